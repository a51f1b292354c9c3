// run_package model.pt2 calls.pt results.pt
//
// Runs an AOTInductor package of an operator, without Python and without the library that made
// it. Set AOTI_RUNTIME_CHECK_INPUTS=1: a package does not look at its inputs otherwise.
//
// calls.pt, as Python's torch.save writes it: a list of calls, each a list of tensors in the
// order of the exported module's inputs, each tensor as a tuple (dtype name, tensor). The
// pickle reader of C++ knows no float8 tensors, so these are stored as their bytes:
//
//     def item(x):
//         e4m3 = x.dtype == torch.float8_e4m3fn
//         return str(x.dtype).split(".")[1], x.view(torch.uint8) if e4m3 else x
//
// results.pt, for torch.load: one (outputs, inputs after the call) per call, of such tuples.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

const std::string kE4M3 = "float8_e4m3fn";

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const std::string& path, const std::vector<char>& data) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(data.data(), static_cast<std::streamsize>(data.size())))
    throw std::runtime_error("cannot write " + path);
}

std::vector<at::Tensor> tensors_from(const c10::IValue& call) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& item : call.toListRef()) {
    const auto& pair = item.toTupleRef().elements();
    at::Tensor tensor = pair[1].toTensor();
    if (pair[0].toStringRef() == kE4M3) tensor = tensor.view(at::kFloat8_e4m3fn);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// As tuples, which torch.load reads without trusting the file; lists would name their type.
c10::IValue stored(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::IValue> items;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;  // a module that returns None
    const bool e4m3 = tensor.scalar_type() == at::kFloat8_e4m3fn;
    const std::string name = e4m3 ? kE4M3 : at::toString(tensor.scalar_type());
    const at::Tensor bytes = e4m3 ? tensor.view(at::kByte) : tensor;
    items.push_back(c10::ivalue::Tuple::create({c10::IValue(name), c10::IValue(bytes)}));
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_package model.pt2 calls.pt results.pt\n";
    return 2;
  }
  try {
    const c10::InferenceMode inference;
    torch::inductor::AOTIModelPackageLoader package(argv[1]);
    const c10::IValue calls = torch::jit::pickle_load(read_file(argv[2]));
    std::vector<c10::IValue> results;
    for (const c10::IValue& call : calls.toListRef()) {
      const std::vector<at::Tensor> inputs = tensors_from(call);
      const std::vector<at::Tensor> outputs = package.run(inputs);
      results.push_back(c10::ivalue::Tuple::create({stored(outputs), stored(inputs)}));
    }
    write_file(argv[3], torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(results))));
  } catch (const c10::Error& error) {
    std::cerr << argv[1] << ": " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << argv[1] << ": " << error.what() << '\n';
    return 1;
  }
  return 0;
}
