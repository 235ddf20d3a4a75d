#include "runtime/variants.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <set>
#include <thread>

#include "fovea/fovea.hpp"
#include "fovea/kernels.hpp"
#include "runtime/backward_gpu.h"
#include "runtime/forward_fp8.h"
#include "runtime/forward_gpu.h"

namespace fovea::runtime {

namespace {

using core::int64;
using core::Problem;
using core::View;

// An address that suits the copy engine; nothing is read from it.
void* const somewhere = reinterpret_cast<void*>(std::uintptr_t{1} << 20);

View dense(core::DType dtype, int64 rows, int64 heads, int64 columns) {
  return {somewhere, dtype, {rows * heads * columns, heads * columns, columns, 1}};
}

struct HeadDims {
  int qk, v;
};

Problem plain_problem(core::DType dtype, HeadDims dims, int64 keys) {
  Problem p;
  p.batch = 1;
  p.seqlen_q = p.seqlen_k = keys;
  p.heads_q = p.heads_kv = 8;
  p.head_dim = dims.qk;
  p.head_dim_v = dims.v;
  p.q = p.k = dense(dtype, keys, p.heads_q, dims.qk);
  p.v = dense(dtype, keys, p.heads_q, dims.v);
  p.out = dense(dtype, keys, p.heads_q, dims.v);
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dims.qk));
  return p;
}

struct Feature {
  std::string_view name;
  bool usual;
  void (*apply)(Problem&);
};

const core::int32 no_lengths[2] = {};
const float no_sink[1] = {};

constexpr Feature features[] = {
    {"full", true, [](Problem&) {}},
    {"causal", true, [](Problem& p) { p.window.right = 0; }},
    {"ragged", true,
     [](Problem& p) {
       p.cu_seqlens_q = p.cu_seqlens_k = no_lengths;
       p.total_q = p.seqlen_q;
     }},
    {"ragged causal", true,
     [](Problem& p) {
       p.cu_seqlens_q = p.cu_seqlens_k = no_lengths;
       p.total_q = p.seqlen_q;
       p.window.right = 0;
     }},
    {"window", false,
     [](Problem& p) {
       p.window = {1024, 0};
     }},
    {"seqused", false, [](Problem& p) { p.seqused_k = no_lengths; }},
    {"softcap causal", false,
     [](Problem& p) {
       p.softcap = 30.0f;
       p.window.right = 0;
     }},
    {"sink causal", false,
     [](Problem& p) {
       p.sink = {const_cast<float*>(no_sink), core::DType::f32, {1, 0, 0, 0}};
       p.window.right = 0;
     }},
    {"sink window", false,
     [](Problem& p) {
       p.sink = {const_cast<float*>(no_sink), core::DType::f32, {1, 0, 0, 0}};
       p.window = {128, 0};
     }},
    {"float out", false, [](Problem& p) { p.out.dtype = core::DType::f32; }},
    {"alibi causal", false,
     [](Problem& p) {
       p.alibi = {somewhere, core::DType::f32, {0, 1, 0, 0}};
       p.window.right = 0;
     }},
    {"bias", false,
     [](Problem& p) {
       p.bias = {somewhere, p.q.dtype, {0, 0, p.seqlen_k, 1}};
     }},
    {"mask", false,
     [](Problem& p) {
       p.mask = {somewhere, core::DType::boolean, {0, 0, p.seqlen_k, 1}};
     }},
    {"dropout", false, [](Problem& p) { p.dropout.probability = 0.1f; }},
};

// Where the choice of a kernel looks at the length, tiles of some problems are not those of others.
struct Length {
  std::string_view name;
  int64 keys;
};
constexpr Length forward_lengths[] = {{"", 2048}, {" long", 16384}};
constexpr Length backward_lengths[] = {{"", 2048}, {" short", 128}};

std::string_view name_of(core::DType dtype) { return dtype == core::DType::bf16 ? "bf16" : "f16"; }

core::Gradients gradients_of(const Problem& p) {
  core::Gradients g;
  g.dout = p.out;
  g.dq = p.q;
  g.dk = p.k;
  g.dv = p.v;
  if (p.sink) g.dsink = p.sink;
  if (p.bias) g.dbias = p.bias;
  return g;
}

struct PartName {
  BackwardPart part;
  std::string_view name;
};
constexpr PartName backward_part_names[] = {
    {BackwardPart::main, ""},          {BackwardPart::prepare, " prepare"},
    {BackwardPart::finish, " finish"}, {BackwardPart::sink, " sink"},
    {BackwardPart::bias, " bias"},     {BackwardPart::bias_sum, " bias sum"}};

constexpr HeadDims usual_dims[] = {{64, 64}, {128, 128}};
constexpr HeadDims all_dims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};

std::string dims_name(HeadDims d) {
  return "d" + std::to_string(d.qk) + (d.v == d.qk ? "" : "/" + std::to_string(d.v));
}

class List {
 public:
  List(std::string_view arch, bool all) : arch_(arch), all_(all) {}

  void add_forward() {
    for (const core::DType dtype : {core::DType::bf16, core::DType::f16}) {
      for_problems(dtype, forward_lengths, [&](const std::string& name, const Problem& p) {
        if (!forward_supports(p, arch_).empty()) return;
        add("fwd " + std::string(name_of(dtype)) + " " + name,
            forward_text(choose_forward(p, core::SoftmaxPolicy::sum_guard, arch_)));
      });
    }
  }

  void add_fp8() {
    for_problems(
        core::DType::bf16, forward_lengths, [&](const std::string& name, const Problem& p) {
          if (!forward_fp8_supports(p, arch_).empty()) return;
          add("fwd fp8 " + name,
              forward_fp8_text(choose_forward_fp8(p, core::SoftmaxPolicy::sum_guard, arch_, 0)));
        });
  }

  void add_backward() {
    for (const core::DType dtype : {core::DType::bf16, core::DType::f16}) {
      const std::string start = "bwd " + std::string(name_of(dtype)) + " ";
      for_problems(dtype, backward_lengths, [&](const std::string& name, const Problem& p) {
        add_gradients(start + name, p);
        if (!all_) return;
        Problem in_turns = p;
        in_turns.deterministic = true;
        add_gradients(start + name + " deterministic", in_turns);
      });
    }
  }

  std::vector<Variant> take() { return std::move(variants_); }

 private:
  template <typename Visit>
  void for_problems(core::DType dtype, std::span<const Length> lengths, const Visit& visit) {
    const std::span<const HeadDims> dims =
        all_ ? std::span<const HeadDims>(all_dims) : std::span<const HeadDims>(usual_dims);
    for (const HeadDims d : dims) {
      for (const Feature& feature : features) {
        if (!feature.usual && !all_) continue;
        for (const Length& length : lengths) {
          Problem p = plain_problem(dtype, d, length.keys);
          feature.apply(p);
          visit(dims_name(d) + " " + std::string(feature.name) + std::string(length.name), p);
        }
      }
    }
  }

  void add_gradients(const std::string& name, const Problem& p) {
    const core::Gradients gradients = gradients_of(p);
    if (!backward_supports(p, gradients, arch_).empty()) return;
    const core::BwdConfig config = choose_backward(p, gradients, arch_);
    for (const PartName& part : backward_part_names) {
      if (part.part == BackwardPart::sink && !gradients.dsink) continue;
      const bool of_bias = part.part == BackwardPart::bias || part.part == BackwardPart::bias_sum;
      if (of_bias && !gradients.dbias) continue;
      add(name + std::string(part.name), backward_text(config, part.part), true);
    }
  }

  void add(std::string name, std::string text, bool may_spill = false) {
    if (!texts_.insert(text).second) return;
    variants_.push_back({std::move(name), std::move(text), may_spill});
  }

  std::string_view arch_;
  bool all_;
  std::set<std::string> texts_;
  std::vector<Variant> variants_;
};

CompiledKernel compile(const Variant& variant, const std::string& arch) {
  CompiledKernel result;
  result.name = variant.name;
  result.arch = arch;
  CompileRequest request;
  request.text = variant.text;
  request.arch = arch;
  request.strict = !variant.may_spill;
  try {
    const CompileResult compiled = default_jit().compile(request);
    result.seconds = compiled.seconds;
    result.cached = compiled.origin != Origin::compiler;
    if (const auto& said = compiled.image->report.advisories; !said.empty()) {
      result.fault = "ptxas slows this kernel down: " + said.front();
    }
    for (const KernelResources& kernel : compiled.image->report.kernels) {
      result.registers = std::max(result.registers, kernel.registers);
      result.spill_bytes += kernel.spill_store_bytes + kernel.spill_load_bytes;
    }
  } catch (const CompileError& fault) {
    result.fault = fault.what();
  }
  return result;
}

}  // namespace

std::vector<Variant> kernel_variants(std::string_view arch, bool all) {
  if (arch != "sm_90a" && arch != "sm_100a" && arch != "sm_103a") {
    throw Error("arch is '" + std::string(arch) + "', but must be sm_90a, sm_100a or sm_103a");
  }
  List list(arch, all);
  list.add_forward();
  if (all) list.add_fp8();
  list.add_backward();
  return list.take();
}

}  // namespace fovea::runtime

namespace fovea {

int compile_kernels(const CompileKernels& which,
                    const std::function<void(const CompiledKernel&)>& done) {
  std::vector<runtime::Variant> variants = runtime::kernel_variants(which.arch, which.all);
  std::erase_if(variants, [&](const runtime::Variant& variant) {
    return variant.name.find(which.only) == std::string::npos;
  });
  if (which.every < 1) {
    throw Error("every is " + std::to_string(which.every) + ", but must be 1 or more");
  }
  std::size_t place = 0;
  const auto every = static_cast<std::size_t>(which.every);
  std::erase_if(variants, [&](const runtime::Variant&) { return place++ % every != 0; });
  (void)runtime::default_jit().compiler_version();  // throws where there is none, before any thread

  std::atomic<std::size_t> next{0};
  std::mutex mutex;  // of done, faults and broken
  int faults = 0;
  std::exception_ptr broken;
  const auto work = [&] {
    for (std::size_t i = next++; i < variants.size(); i = next++) {
      try {
        const CompiledKernel kernel = runtime::compile(variants[i], which.arch);
        const std::lock_guard lock(mutex);
        faults += kernel.fault.empty() ? 0 : 1;
        done(kernel);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!broken) broken = std::current_exception();
        next = variants.size();
      }
    }
  };
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t wanted = which.threads > 0 ? static_cast<std::size_t>(which.threads) : cores;
  {
    std::vector<std::jthread> threads(std::min(wanted, variants.size()));
    for (std::jthread& thread : threads) thread = std::jthread(work);
  }
  if (broken) std::rethrow_exception(broken);
  return faults;
}

}  // namespace fovea
