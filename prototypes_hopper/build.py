"""Lower one variant, compile to cubin, print registers, spills, warnings."""
import os, re, subprocess, sys, time
os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")
sys.path.insert(0, "/tmp/hopper/proto")
import tilelang
from tilelang import tvm
from tvm.target import Target

def source(fn, passes):
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    with tvm.transform.PassContext(opt_level=3, config=passes), target:
        return tilelang.lower(fn, target=target, enable_device_compile=False).kernel_source

def compile_cubin(src, name, out="/tmp/hopper/out"):
    os.makedirs(out, exist_ok=True)
    cu = f"{out}/{name}.cu"
    open(cu, "w").write(src)
    root = os.path.dirname(tilelang.__file__)
    cmd = ["nvcc", "-std=c++17", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a",
           "--expt-relaxed-constexpr", "-Xptxas", "-v", "-w", "-keep", f"-keep-dir={out}",
           f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include", cu, "-o", f"{out}/{name}.cubin"]
    t = time.time()
    r = subprocess.run(cmd, capture_output=True, text=True)
    log = r.stdout + r.stderr
    open(f"{out}/{name}.log", "w").write(log)
    return r.returncode, log, time.time() - t

if __name__ == "__main__":
    import attention, importlib; variants = importlib.import_module(os.environ.get("VARS", "variants"))
    names = sys.argv[1:] or list(variants.VARIANTS)
    for name in names:
        kw = variants.VARIANTS[name]
        t = time.time()
        src = source(attention.make(**kw), attention.PASSES)
        t1 = time.time() - t
        rc, log, t2 = compile_cubin(src, name)
        keep = [l.strip() for l in log.splitlines() if re.search(r"Used|spill|C75|error|warning", l)]
        print(name, f"lower {t1:.1f}s nvcc {t2:.1f}s rc={rc}", *keep[:12], sep="\n   ")
