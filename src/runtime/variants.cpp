#include "runtime/variants.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <set>
#include <thread>

#include "fovea/fovea.hpp"
#include "fovea/kernels.hpp"
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
};

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
      for_problems(dtype, [&](const std::string& name, const Problem& p) {
        if (!forward_supports(p, arch_).empty()) return;
        add("fwd " + std::string(dtype == core::DType::bf16 ? "bf16 " : "f16 ") + name,
            forward_text(choose_forward(p, core::SoftmaxPolicy::sum_guard, arch_)));
      });
    }
  }

  void add_fp8() {
    for_problems(core::DType::bf16, [&](const std::string& name, const Problem& p) {
      if (!forward_fp8_supports(p, arch_).empty()) return;
      add("fwd fp8 " + name,
          forward_fp8_text(choose_forward_fp8(p, core::SoftmaxPolicy::sum_guard, arch_, 0)));
    });
  }

  std::vector<Variant> take() { return std::move(variants_); }

 private:
  template <typename Visit>
  void for_problems(core::DType dtype, const Visit& visit) {
    const std::span<const HeadDims> dims =
        all_ ? std::span<const HeadDims>(all_dims) : std::span<const HeadDims>(usual_dims);
    for (const HeadDims d : dims) {
      for (const Feature& feature : features) {
        if (!feature.usual && !all_) continue;
        // The choice looks at the length: tiles of long problems are not those of short ones.
        for (const int64 keys : {2048, 16384}) {
          Problem p = plain_problem(dtype, d, keys);
          feature.apply(p);
          visit(dims_name(d) + " " + std::string(feature.name) + (keys > 8192 ? " long" : ""), p);
        }
      }
    }
  }

  void add(std::string name, std::string text) {
    if (texts_.insert(text).second) variants_.push_back({std::move(name), std::move(text)});
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
  try {
    const CompileResult compiled = default_jit().compile(request);
    result.seconds = compiled.seconds;
    result.cached = compiled.origin != Origin::compiler;
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
