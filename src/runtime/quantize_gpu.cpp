#include "runtime/quantize_gpu.h"

#include <algorithm>
#include <span>

#include "runtime/source.h"

namespace fovea::runtime {

namespace {

using core::DType;
using core::int32;
using core::int64;
using core::QuantizeConfig;
using core::QuantizeParams;
using core::QuantizePass;

std::string_view text_of(DType type) {
  switch (type) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    default: return "f32";
  }
}

std::string_view text_of(QuantizePass pass) {
  switch (pass) {
    case QuantizePass::measure: return "measure";
    case QuantizePass::apply: return "apply";
    default: return "block";
  }
}

// Eight elements of a row are one access of the kernel (two of fp32).
bool suits_vectors(const core::View& view, int32 columns) {
  const int64 size = core::size_bytes(view.dtype);
  const int64 unit = std::min<int64>(8 * size, 16) / size;
  if (columns % 8 != 0 || view.stride[3] != 1) return false;
  if (reinterpret_cast<DeviceAddress>(view.data) % static_cast<DeviceAddress>(unit * size) != 0) {
    return false;
  }
  return std::all_of(view.stride, view.stride + 3, [&](int64 s) { return s % unit == 0; });
}

QuantizeParams operand(const core::View& view, int64 rows, int32 heads, int32 columns, int64 blocks,
                       const int32* cu_seqlens, int64 sequences) {
  QuantizeParams params;
  params.x = view.data;
  std::copy(view.stride, view.stride + 4, params.stride);
  params.rows = rows;
  params.heads = heads;
  params.columns = columns;
  params.blocks = static_cast<int32>(blocks);
  params.sequences = static_cast<int32>(sequences);
  params.cu_seqlens = cu_seqlens;
  return params;
}

}  // namespace

std::string quantize_text(const QuantizeConfig& c) {
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  KernelSource source;
  source.include = "device/quantize.cuh";
  source.call =
      "fovea::device::quantize<fovea::core::QuantizeConfig{.dtype = fovea::core::DType::" +
      std::string(text_of(c.dtype)) + ", .columns = " + std::to_string(c.columns) +
      ", .rotate = " + flag(c.rotate) + ", .transpose = " + flag(c.transpose) +
      ", .vectors = " + flag(c.vectors) +
      ", .pass = fovea::core::QuantizePass::" + std::string(text_of(c.pass)) + "}>";
  source.params = "fovea::core::QuantizeParams";
  source.threads = core::quantize_threads;
  return kernel_text(source);
}

Quantizer::Quantizer(Device& device, const core::Problem& p, const core::QuantizeOptions& options,
                     Jit& jit)
    : device_(device), options_(options) {
  q_ = build(p.q, p.head_dim, false, jit);
  k_ = build(p.k, p.head_dim, false, jit);
  v_ = build(p.v, p.head_dim_v, true, jit);
}

Quantizer::Pass Quantizer::build(const core::View& view, int32 columns, bool transpose,
                                 Jit& jit) const {
  Pass pass;
  QuantizeConfig& c = pass.config;
  c.dtype = view.dtype;
  c.columns = core::fp8_columns(columns);
  c.rotate = options_.rotate && !transpose;
  c.transpose = transpose;
  c.vectors = suits_vectors(view, columns);
  const auto load = [&](QuantizePass which) {
    c.pass = which;
    CompileRequest request;
    request.text = quantize_text(c);
    request.arch = device_.properties().arch;
    request.format = device_.properties().image_format;
    return device_.load(jit.compile(request).image->bytes, kernel_entry);
  };
  if (options_.granularity == core::ScaleGranularity::block) {
    pass.write = load(QuantizePass::block);
  } else {
    pass.measure = load(QuantizePass::measure);
    pass.write = load(QuantizePass::apply);
  }
  return pass;
}

std::size_t Quantizer::scratch_bytes(const core::Problem& p) const {
  switch (options_.granularity) {
    case core::ScaleGranularity::block: return 0;
    case core::ScaleGranularity::tensor: return sizeof(core::uint32);
    case core::ScaleGranularity::head: break;
  }
  return static_cast<std::size_t>(p.batch) *
         static_cast<std::size_t>(std::max(p.heads_q, p.heads_kv)) * sizeof(core::uint32);
}

void Quantizer::run(const Pass& pass, QuantizeParams params, int64 batches, DeviceAddress scratch,
                    Stream stream) const {
  constexpr int32 blocks_of_cta = core::quantize_rows / core::scale_block;
  LaunchConfig launch;
  launch.grid.x = static_cast<std::uint32_t>(core::ceil_div(params.blocks, blocks_of_cta)) *
                  static_cast<std::uint32_t>(params.heads);
  launch.grid.y = static_cast<std::uint32_t>(batches);
  launch.block.x = core::quantize_threads;
  launch.dynamic_shared_bytes =
      static_cast<std::uint32_t>(core::quantize_shared_bytes(pass.config));
  if (launch.grid.x == 0 || batches == 0) return;
  params.signs = core::rotation_signs(options_.seed);
  const auto bytes = std::as_bytes(std::span(&params, 1));
  if (pass.measure != nullptr) {
    const bool heads = options_.granularity == core::ScaleGranularity::head;
    params.largest = reinterpret_cast<core::uint32*>(scratch);
    params.largest_stride[0] = heads ? params.heads : 0;
    params.largest_stride[1] = heads ? 1 : 0;
    const std::size_t count =
        heads ? static_cast<std::size_t>(batches) * static_cast<std::size_t>(params.heads) : 1;
    device_.fill(scratch, 0, count * sizeof(core::uint32), stream);
    device_.launch(*pass.measure, launch, bytes, stream);
  }
  device_.launch(*pass.write, launch, bytes, stream);
}

void Quantizer::run_q(const ForwardCall& call, const Fp8Operands& operands, DeviceAddress scratch,
                      Stream stream) const {
  const core::Problem& p = call.problem;
  const core::Fp8Layout l = core::fp8_layout(p);
  QuantizeParams params =
      operand(p.q, l.rows_q, l.heads_q, p.head_dim, l.blocks_q, p.cu_seqlens_q, p.batch);
  params.codes = reinterpret_cast<core::uint8*>(operands.q);
  params.q_scale = reinterpret_cast<float*>(operands.q_scale);
  run(q_, params, l.batches_q, scratch, stream);
}

void Quantizer::run_keys(const ForwardCall& call, const Fp8Operands& operands,
                         DeviceAddress scratch, Stream stream) const {
  const core::Problem& p = call.problem;
  const core::Fp8Layout l = core::fp8_layout(p);
  QuantizeParams k =
      operand(p.k, l.rows_k, l.heads_kv, p.head_dim, l.blocks_k, p.cu_seqlens_k, p.batch);
  k.codes = reinterpret_cast<core::uint8*>(operands.k);
  k.key_scale = reinterpret_cast<core::KeyScale*>(operands.key_scale);
  run(k_, k, l.batches_k, scratch, stream);
  QuantizeParams v =
      operand(p.v, l.rows_k, l.heads_kv, p.head_dim_v, l.blocks_k, p.cu_seqlens_k, p.batch);
  v.codes = reinterpret_cast<core::uint8*>(operands.v);
  v.key_scale = reinterpret_cast<core::KeyScale*>(operands.key_scale);
  run(v_, v, l.batches_k, scratch, stream);
}

}  // namespace fovea::runtime
