#include "tools/quantized_pages.h"

#include <algorithm>
#include <array>

namespace fovea::tools {
namespace {

// Pages of whole sequences, of which one is left over.
PagePool pool_for(const Workload& w, std::int64_t page_size) {
  const std::int64_t batch =
      w.cu_seqlens_k.empty() ? w.problem.k.shape[0] : std::ssize(w.cu_seqlens_k) - 1;
  std::int64_t longest = w.cu_seqlens_k.empty() ? w.problem.k.shape[1] : 0;
  for (std::size_t b = 1; b < w.cu_seqlens_k.size(); ++b) {
    longest = std::max<std::int64_t>(longest, w.cu_seqlens_k[b] - w.cu_seqlens_k[b - 1]);
  }
  const std::int64_t columns = std::max<std::int64_t>((longest + page_size - 1) / page_size, 1);
  return {batch * columns + 1, page_size};
}

}  // namespace

QuantizedPages::QuantizedPages(Workload& w, const Quantization& quantization,
                               std::int64_t page_size, std::uint64_t seed)
    : workload_(w),
      plan_(plan_quantize(w.problem, quantization, pool_for(w, page_size))),
      codes_(plan_.operands()) {
  for (Tensor* tensor : {&codes_.q, &codes_.q_scale, &codes_.k, &codes_.v, &codes_.key_scale}) {
    const auto& [i0, i1, i2, i3] = tensor->shape;
    tensor->data = w.allocate(i0 * i1 * i2 * i3, tensor->dtype);
  }
  // Of scales in host memory a plan reads the values, too.
  const std::array<std::int64_t, 4>& scales = codes_.q_scale.shape;
  std::fill_n(static_cast<float*>(codes_.q_scale.data), scales[0] * scales[1] * scales[2], 1.0f);
  const PagePool pool = pool_for(w, page_size);
  const std::int64_t batch =
      w.cu_seqlens_k.empty() ? w.problem.k.shape[0] : std::ssize(w.cu_seqlens_k) - 1;
  w.block_table = random_order(pool.pages, seed);
  w.block_table.pop_back();
  w.seqused_k.clear();
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto i = static_cast<std::size_t>(b);
    w.seqused_k.push_back(w.cu_seqlens_k.empty() ? static_cast<std::int32_t>(w.problem.k.shape[1])
                                                 : w.cu_seqlens_k[i + 1] - w.cu_seqlens_k[i]);
  }
  codes_.block_table = w.block_table;
  codes_.block_table_columns = batch == 0 ? 0 : std::ssize(w.block_table) / batch;
  problem_ = attend(w.problem, codes_);
  problem_.cu_seqlens_k = {};
  problem_.seqused_k = w.seqused_k;
  problem_.block_table = codes_.block_table;
  problem_.block_table_columns = codes_.block_table_columns;
}

void QuantizedPages::fill() { plan_.run(workload_.problem, codes_, {}); }

}  // namespace fovea::tools
