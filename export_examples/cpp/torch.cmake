# The target `installed_torch`: headers and libraries of the torch package of a Python.
#
# They are named one by one because find_package(Torch) of a CUDA wheel asks for a CUDA toolkit,
# which a program that runs packages does not need, on a GPU neither.
set(TORCH_PACKAGE "" CACHE PATH "folder of the installed torch package")
if(NOT IS_DIRECTORY "${TORCH_PACKAGE}/include")
  message(FATAL_ERROR "Set TORCH_PACKAGE to the folder of the installed torch package:\n"
    "  -DTORCH_PACKAGE=$(python -c 'import torch; print(torch.__path__[0])')")
endif()
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

set(libraries torch torch_cpu c10)
foreach(library torch_cuda c10_cuda)
  if(EXISTS "${TORCH_PACKAGE}/lib/lib${library}.so")
    list(APPEND libraries ${library})
  endif()
endforeach()
list(TRANSFORM libraries REPLACE "(.+)" "${TORCH_PACKAGE}/lib/lib\\1.so")

add_library(installed_torch INTERFACE)
target_compile_features(installed_torch INTERFACE cxx_std_20)
target_include_directories(installed_torch SYSTEM INTERFACE
  "${TORCH_PACKAGE}/include" "${TORCH_PACKAGE}/include/torch/csrc/api/include")
# No symbol of the GPU's libraries is named, but they register what runs there.
target_link_libraries(installed_torch INTERFACE -Wl,--no-as-needed ${libraries})
