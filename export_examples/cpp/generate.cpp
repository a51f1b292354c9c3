// Greedy generation with the two exported steps of SmolLM2, without Python.
//
//   generate PREFILL.pt2 DECODE.pt2 WEIGHTS PAGES [DEVICE] < requests > tokens
//
// The program owns the page pool, the page allocator, the loop and the stop rule; it is the twin
// of smollm2/engine.py. Token ids come in and go out, text is the caller's business. DEVICE is cpu
// (where there is none), cuda or cuda:N; the packages must have been compiled for such a one.
//
// WEIGHTS is a folder: weights.bin holds float32 values, weights.txt one line per tensor,
//   NAME OFFSET RANK EXTENT...                      (the offset counts values, not bytes)
// Standard input, until its end:
//   stop COUNT ID...
//   request MAX_NEW_TOKENS COUNT ID... COUNT ID...  (the prompt, then ids fed instead of picks)
// Standard output, flushed after every step:
//   ready                                           (packages and weights are loaded)
//   prefill 0:4922 1:253                            (REQUEST:TOKEN)
//   decode 0:30! 1:31                               (! marks a request's last token)

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Ids = std::vector<int64_t>;
using Loader = torch::inductor::AOTIModelPackageLoader;
using Tensors = std::vector<at::Tensor>;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct Request {
  int64_t max_new_tokens = 0;
  Ids prompt;
  Ids forced;

  // The most tokens its cache can hold; the last pick is never fed.
  int64_t max_cached() const {
    return static_cast<int64_t>(prompt.size()) + max_new_tokens - 1;
  }
};

struct Job {
  std::set<int64_t> stop;
  std::vector<Request> requests;
};

// A request on its way: what it feeds next, and the pages it owns.
struct Active {
  size_t index = 0;
  const Request* request = nullptr;
  Ids pending;
  Ids pages;
  int64_t promised = 0;
  int64_t cached = 0;
  int64_t picked = 0;
  bool done = false;
};

struct Geometry {
  int64_t layers;
  int64_t heads_kv;
  int64_t head_dim;
  int64_t page_size;
  int64_t context;
};

// Hands out pages. A request that was let in is promised the most pages it may need, so it can
// always grow; pages are taken only when tokens need them.
class PageAllocator {
 public:
  PageAllocator(int64_t pages, int64_t page_size) : pages_(pages), page_size_(page_size) {
    for (int64_t page = pages - 1; page >= 0; --page) {
      free_.push_back(page);
    }
  }

  bool open(Active& active) {
    const int64_t need = ceil_div(active.request->max_cached(), page_size_);
    if (need > pages_) {
      throw std::runtime_error(
          "Request " + std::to_string(active.index) + " needs " + std::to_string(need) +
          " pages, but the pool has " + std::to_string(pages_) + ".");
    }
    if (promised_ + need > pages_) {
      return false;
    }
    active.promised = need;
    promised_ += need;
    return true;
  }

  void grow(Active& active, int64_t tokens) {
    while (static_cast<int64_t>(active.pages.size()) * page_size_ < tokens) {
      active.pages.push_back(free_.back());
      free_.pop_back();
    }
  }

  void close(Active& active) {
    free_.insert(free_.end(), active.pages.rbegin(), active.pages.rend());
    promised_ -= active.promised;
    active.pages.clear();
  }

 private:
  int64_t pages_;
  int64_t page_size_;
  int64_t promised_ = 0;
  Ids free_;
};

Ids read_ids(std::istream& in) {
  size_t count = 0;
  in >> count;
  Ids ids;
  for (int64_t id = 0; ids.size() < count && in >> id;) {
    ids.push_back(id);
  }
  if (!in || ids.size() != count) {
    throw std::runtime_error("A line of the input ends before its ids do.");
  }
  return ids;
}

Job read_job(std::istream& in, int64_t context) {
  Job job;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "stop") {
      const Ids ids = read_ids(words);
      job.stop.insert(ids.begin(), ids.end());
    } else if (kind == "request") {
      Request request;
      words >> request.max_new_tokens;
      request.prompt = read_ids(words);
      request.forced = read_ids(words);
      const bool enough = request.forced.empty() ||
          static_cast<int64_t>(request.forced.size()) >= request.max_new_tokens;
      if (request.prompt.empty() || request.max_new_tokens < 1 || !enough ||
          request.max_cached() > context) {
        throw std::runtime_error(
            "Request " + std::to_string(job.requests.size()) +
            " is empty, too long, or has fewer forced ids than new tokens.");
      }
      job.requests.push_back(std::move(request));
    } else {
      throw std::runtime_error("The input has a line that starts with '" + kind + "'.");
    }
  }
  if (job.requests.empty()) {
    throw std::runtime_error("The input has no request.");
  }
  return job;
}

// The device called cpu, cuda or cuda:N.
at::Device open_device(const std::string& name) {
  at::Device device(name);
  if (device.is_cpu()) {
    return device;
  }
  if (!device.is_cuda() || !at::hasCUDA()) {
    throw std::runtime_error("There is no device " + name + " here.");
  }
  const at::DeviceIndex index = device.has_index() ? device.index() : 0;
  if (index >= static_cast<int64_t>(at::getNumGPUs())) {
    throw std::runtime_error(
        "There is no device " + name + " here, the number of GPUs is " +
        std::to_string(at::getNumGPUs()) + ".");
  }
  return at::Device(at::kCUDA, index);
}

// The network's parameters: views into one memory-mapped file, or into its copy on a GPU.
struct Weights {
  at::Tensor embedding;
  at::Tensor norm;
  at::Tensor output;
  std::vector<Tensors> layers;
};

Weights map_weights(const std::string& folder, int64_t layers, at::Device device) {
  std::ifstream index(folder + "/weights.txt");
  if (!index) {
    throw std::runtime_error("There is no weights.txt in " + folder + ".");
  }
  struct Entry {
    std::string name;
    int64_t offset = 0;
    int64_t count = 1;
    std::vector<int64_t> shape;
  };
  std::vector<Entry> entries;
  int64_t total = 0;
  for (std::string line; std::getline(index, line);) {
    std::istringstream words(line);
    Entry entry;
    size_t rank = 0;
    words >> entry.name >> entry.offset >> rank;
    entry.shape.resize(rank);
    for (auto& extent : entry.shape) {
      words >> extent;
      entry.count *= extent;
    }
    if (!words) {
      throw std::runtime_error("weights.txt has a malformed line: " + line);
    }
    total = std::max(total, entry.offset + entry.count);
    entries.push_back(std::move(entry));
  }
  const auto values =
      at::from_file(folder + "/weights.bin", /*shared=*/false, total, at::kFloat).to(device);
  const std::string block = "blk.";
  Weights weights;
  weights.layers.resize(layers);
  for (const auto& entry : entries) {
    const auto value = values.narrow(0, entry.offset, entry.count).view(entry.shape);
    if (entry.name.rfind(block, 0) == 0) {
      weights.layers.at(std::stoull(entry.name.substr(block.size()))).push_back(value);
    } else if (entry.name == "token_embd.weight") {
      weights.embedding = value;
    } else if (entry.name == "output_norm.weight") {
      weights.norm = value;
    } else if (entry.name == "output.weight") {
      weights.output = value;
    } else {
      throw std::runtime_error("weights.txt names an unknown tensor " + entry.name + ".");
    }
  }
  if (!weights.output.defined()) {
    weights.output = weights.embedding;
  }
  return weights;
}

Geometry read_geometry(const std::string& package, at::Device device) {
  if (!std::ifstream(package)) {
    throw std::runtime_error("There is no package at " + package + ".");
  }
  const auto metadata = Loader::load_metadata_from_package(package, "layer");
  const auto entry = [&](const char* name) {
    const auto found = metadata.find(name);
    if (found == metadata.end()) {
      throw std::runtime_error(package + " does not say its " + name + ".");
    }
    return found->second;
  };
  const auto figure = [&](const char* name) {
    return static_cast<int64_t>(std::stoll(entry(name)));
  };
  const std::string made_for = entry("AOTI_DEVICE_KEY");
  const std::string wanted = at::DeviceTypeName(device.type(), /*lower_case=*/true);
  if (made_for != wanted) {
    throw std::runtime_error(
        package + " was compiled for " + made_for + " and cannot run on " + wanted + ".");
  }
  return {
      figure("layers"),
      figure("heads_kv"),
      figure("head_dim"),
      figure("page_size"),
      figure("context")};
}

// The key and the value pool of every layer, in the shape that one of the steps takes.
struct Pools {
  Tensors k;
  Tensors v;
};

// One step: the layer program once per layer, then the head program.
class Step {
 public:
  Step(const std::string& package, at::Device device)
      : layer_(load(package, "layer", device)), head_(load(package, "head", device)) {}

  at::Tensor run(
      const Weights& weights,
      const Pools& pools,
      const at::Tensor& tokens,
      const Tensors& positions,
      const Tensors& ends = {}) {
    at::Tensor x = at::embedding(weights.embedding, tokens);
    for (size_t i = 0; i < weights.layers.size(); ++i) {
      Tensors inputs{x};
      inputs.insert(inputs.end(), positions.begin(), positions.end());
      inputs.push_back(pools.k[i]);
      inputs.push_back(pools.v[i]);
      inputs.insert(inputs.end(), weights.layers[i].begin(), weights.layers[i].end());
      x = layer_.run(inputs).at(0);
    }
    Tensors inputs{x};
    inputs.insert(inputs.end(), ends.begin(), ends.end());
    inputs.push_back(weights.norm);
    inputs.push_back(weights.output);
    return head_.run(inputs).at(0);
  }

 private:
  static Loader load(const std::string& package, const char* program, at::Device device) {
    return Loader(
        package, program, /*run_single_threaded=*/false, /*num_runners=*/1, device.index());
  }

  Loader layer_;
  Loader head_;
};

class Model {
 public:
  Model(
      const std::string& prefill,
      const std::string& decode,
      const std::string& weights,
      at::Device device)
      : geometry(read_geometry(prefill, device)),
        device(device),
        prefill_(prefill, device),
        decode_(decode, device),
        weights_(map_weights(weights, geometry.layers, device)) {}

  void allocate_pools(int64_t pages) {
    const auto& g = geometry;
    const auto fresh = [&] {
      return at::zeros(
          {pages, g.page_size, g.heads_kv, g.head_dim}, at::device(device).dtype(at::kBFloat16));
    };
    for (int64_t layer = 0; layer < g.layers; ++layer) {
      paged_.k.push_back(fresh());
      paged_.v.push_back(fresh());
      flat_.k.push_back(paged_.k.back().flatten(0, 1));
      flat_.v.push_back(paged_.v.back().flatten(0, 1));
    }
  }

  at::Tensor prefill(
      const at::Tensor& tokens,
      const at::Tensor& cu_seqlens_q,
      const at::Tensor& cache_seqlens,
      const at::Tensor& block_table) {
    const Tensors positions{cu_seqlens_q, cache_seqlens, block_table};
    return prefill_.run(weights_, flat_, tokens, positions, {cu_seqlens_q});
  }

  at::Tensor decode(
      const at::Tensor& tokens, const at::Tensor& cache_seqlens, const at::Tensor& block_table) {
    return decode_.run(weights_, paged_, tokens, {cache_seqlens, block_table});
  }

  const Geometry geometry;
  const at::Device device;

 private:
  Step prefill_;
  Step decode_;
  Weights weights_;
  Pools paged_;
  Pools flat_; // the same memory
};

// Feed the pending tokens of every request of the batch and return the ids picked.
Ids run_step(Model& model, std::vector<Active*>& batch, int64_t width, bool prefill) {
  Ids tokens, lengths, offsets{0}, table;
  for (const Active* active : batch) {
    tokens.insert(tokens.end(), active->pending.begin(), active->pending.end());
    lengths.push_back(active->cached);
    offsets.push_back(static_cast<int64_t>(tokens.size()));
    table.insert(table.end(), active->pages.begin(), active->pages.end());
    table.resize(lengths.size() * width, -1);
  }
  const auto tensor_of = [&](const Ids& values, at::ScalarType dtype) {
    return at::tensor(values, at::kLong).to(model.device, dtype);
  };
  const auto rows = static_cast<int64_t>(batch.size());
  const auto block_table = tensor_of(table, at::kInt).view({rows, width});
  const auto cache_seqlens = tensor_of(lengths, at::kInt);
  const auto logits = prefill
      ? model.prefill(
            tensor_of(tokens, at::kLong), tensor_of(offsets, at::kInt), cache_seqlens, block_table)
      : model.decode(tensor_of(tokens, at::kLong), cache_seqlens, block_table);
  const auto picks = logits.argmax(1).to(at::kCPU).contiguous(); // the step's only read
  const auto* first = picks.const_data_ptr<int64_t>();
  return Ids(first, first + rows);
}

void accept(Active& active, int64_t token, const std::set<int64_t>& stop) {
  const Request& request = *active.request;
  const bool forced = !request.forced.empty();
  active.cached += static_cast<int64_t>(active.pending.size());
  active.pending = {forced ? request.forced[active.picked] : token};
  active.picked += 1;
  active.done = active.picked == request.max_new_tokens || (!forced && stop.count(token) > 0);
}

void generate(Model& model, const Job& job, int64_t pages) {
  const int64_t page_size = model.geometry.page_size;
  PageAllocator allocator(pages, page_size);
  model.allocate_pools(pages);
  std::deque<Active> all;
  std::deque<Active*> waiting;
  std::vector<Active*> running;
  int64_t width = 1;
  for (const Request& request : job.requests) {
    all.push_back({all.size(), &request, request.prompt});
    waiting.push_back(&all.back());
    width = std::max(width, ceil_div(request.max_cached(), page_size));
  }
  while (!waiting.empty() || !running.empty()) {
    std::vector<Active*> batch;
    while (!waiting.empty() && allocator.open(*waiting.front())) {
      batch.push_back(waiting.front());
      waiting.pop_front();
    }
    const bool prefill = !batch.empty();
    if (prefill) {
      running.insert(running.end(), batch.begin(), batch.end());
    } else {
      batch = running;
    }
    for (Active* active : batch) {
      allocator.grow(*active, active->cached + static_cast<int64_t>(active->pending.size()));
    }
    const Ids tokens = run_step(model, batch, width, prefill);
    std::cout << (prefill ? "prefill" : "decode");
    for (size_t i = 0; i < batch.size(); ++i) {
      Active& active = *batch[i];
      accept(active, tokens[i], job.stop);
      std::cout << ' ' << active.index << ':' << tokens[i] << (active.done ? "!" : "");
      if (active.done) {
        allocator.close(active);
      }
    }
    std::cout << std::endl;
    std::erase_if(running, [](const Active* active) { return active->done; });
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    std::cerr << "usage: generate PREFILL.pt2 DECODE.pt2 WEIGHTS PAGES [DEVICE] < requests\n";
    return 2;
  }
  try {
    // Packages check their inputs only when asked to.
    setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);
    c10::InferenceMode mode;
    const at::Device device = open_device(argc == 6 ? argv[5] : "cpu");
    const c10::DeviceGuard on(device);
    // Activations are float32 throughout; some environments let GPUs round them to TF32.
    at::globalContext().setFloat32MatmulPrecision("highest");
    Model model(argv[1], argv[2], argv[3], device);
    const Job job = read_job(std::cin, model.geometry.context);
    std::cout << "ready" << std::endl;
    generate(model, job, std::stoll(argv[4]));
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
