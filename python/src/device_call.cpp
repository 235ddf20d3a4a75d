#include "python/device_call.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <unordered_map>

namespace fovea::python {
namespace {

// What a plan depends on, as bytes: all of a problem but its addresses, its stream, and its
// dropout's seed and offset.
class Signature {
 public:
  Signature(const Call& call, Device device) {
    bytes_.reserve(usual_bytes);
    const Problem& p = call.problem();
    add(device);
    add(call.device().id);
    for (const Tensor* tensor : {&p.q, &p.k, &p.v, &p.out, &p.lse, &p.bias, &p.mask, &p.sink,
                                 &p.alibi, &p.q_scale, &p.k_scale, &p.v_scale, &p.key_scale}) {
      add(*tensor);
    }
    for (const auto lengths :
         {p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_q, p.seqused_k, p.block_table}) {
      add(lengths.size());
    }
    add(p.block_table_columns);
    add(p.max_seqlen_q);
    add(p.max_seqlen_k);
    add(p.softmax_scale.has_value());
    add(p.softmax_scale.value_or(0.0f));
    add(p.causal);
    add(p.window_left);
    add(p.window_right);
    add(p.softcap);
    add(p.dropout.probability);
    add(p.num_splits);
    add(p.deterministic);
  }

  void add(const Tensor& tensor) {
    add(tensor.present);
    if (!tensor.present) return;
    add(tensor.dtype);
    for (const std::int64_t extent : tensor.shape) add(extent);
    for (const std::int64_t stride : tensor.stride) add(stride);
    add(std::min(std::countr_zero(reinterpret_cast<std::uintptr_t>(tensor.data)), most_alignment));
  }

  template <typename Value>
  void add(Value value) {
    static_assert(std::is_arithmetic_v<Value> || std::is_enum_v<Value>);
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof value);
    std::memcpy(bytes_.data() + at, &value, sizeof value);
  }

  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  static constexpr std::size_t usual_bytes = 1024;
  // 64 bytes: no kernel asks for more.
  static constexpr int most_alignment = 6;

  std::string bytes_;
};

// The plan of this signature; make() makes it, without Python's lock, which guards the plans: a
// kernel may have to be compiled.
template <typename PlanType, typename Make>
PlanType plan_of(const Signature& signature, const Make& make) {
  constexpr std::size_t most_plans = 1024;
  // Never destroyed: at exit the driver may be gone before it.
  static auto* const plans = new std::unordered_map<std::string, PlanType>;
  if (const auto found = plans->find(signature.bytes()); found != plans->end()) {
    return found->second;
  }
  PlanType made = [&] {
    const nb::gil_scoped_release unlocked;
    return make();
  }();
  if (plans->size() >= most_plans) plans->clear();
  plans->insert_or_assign(signature.bytes(), made);
  return made;
}

Options options_for(Device device) {
  Options options;
  options.device = device;
  return options;
}

Plan plan_of(const Call& call, Device device) {
  return plan_of<Plan>(Signature(call, device),
                       [&] { return fovea::plan(call.problem(), options_for(device)); });
}

class Workspace {
 public:
  Workspace(const Call& call, nb::handle allocate, std::size_t bytes) {
    if (bytes == 0) return;
    array_ = call.array(q).bytes_beside(bytes);
    if (!array_.present()) array_ = Array(allocate(bytes), "workspace", Access::write);
    bytes_ = {static_cast<std::byte*>(array_.data()), bytes};
  }

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

 private:
  Array array_;
  std::span<std::byte> bytes_;
};

}  // namespace

void attention_on_device(const Call& call, nb::handle allocate, Device device) {
  const Plan plan = plan_of(call, device);
  const Workspace workspace(call, allocate, plan.workspace_bytes());
  const nb::gil_scoped_release unlocked;
  plan.run(call.problem(), workspace.bytes());
}

void attention_backward_on_device(const Call& call, const Gradients& gradients, nb::handle allocate,
                                  Device device) {
  Signature signature(call, device);
  for (const Tensor* tensor : {&gradients.dout, &gradients.dlse, &gradients.dq, &gradients.dk,
                               &gradients.dv, &gradients.dsink, &gradients.dbias}) {
    signature.add(*tensor);
  }
  const auto plan = plan_of<BackwardPlan>(signature, [&] {
    return fovea::plan_backward(call.problem(), gradients, options_for(device));
  });
  const Workspace workspace(call, allocate, plan.workspace_bytes());
  const nb::gil_scoped_release unlocked;
  plan.run(call.problem(), gradients, workspace.bytes());
}

QuantizePlan quantize_plan_on_device(const Call& call, const Quantization& quantization,
                                     ValueLayout values, const PagePool& pool, Device device) {
  Signature signature(call, device);
  signature.add(quantization.dtype);
  signature.add(quantization.scales);
  signature.add(quantization.rotate);
  signature.add(quantization.seed);
  signature.add(quantization.rotary.interleaved);
  signature.add(quantization.rotary.first_position);
  for (const Tensor* table : {&quantization.rotary.cos, &quantization.rotary.sin}) {
    signature.add(*table);
    signature.add(reinterpret_cast<std::uintptr_t>(table->data));  // which the plan keeps
  }
  signature.add(values);
  signature.add(pool.pages);
  signature.add(pool.page_size);
  return plan_of<QuantizePlan>(signature, [&] {
    const Options options = options_for(device);
    return pool.pages == 0 ? plan_quantize(call.problem(), quantization, values, options)
                           : plan_quantize(call.problem(), quantization, pool, options);
  });
}

double seconds_of_launch(const Call& call, int repeat, nb::handle allocate) {
  const Plan plan = plan_of(call, Device::automatic);
  const Workspace workspace(call, allocate, plan.workspace_bytes());
  const nb::gil_scoped_release unlocked;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeat; ++i) plan.run(call.problem(), workspace.bytes());
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / repeat;
}

}  // namespace fovea::python
