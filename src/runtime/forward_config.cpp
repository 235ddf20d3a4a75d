#include "runtime/forward_config.h"

namespace fovea::runtime {

namespace {

using core::DType;
using core::ScoreTransform;
using core::SoftmaxPolicy;

std::string_view name_of(DType type) {
  switch (type) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::e4m3: return "e4m3";
    default: return "f32";
  }
}

std::string_view name_of(SoftmaxPolicy policy) {
  switch (policy) {
    case SoftmaxPolicy::online: return "online";
    case SoftmaxPolicy::conditional: return "conditional";
    default: return "sum_guard";
  }
}

std::string_view name_of(ScoreTransform transform) {
  switch (transform) {
    case ScoreTransform::scale: return "scale";
    case ScoreTransform::softcap: return "softcap";
    default: return "none";
  }
}

}  // namespace

void ConfigText::type(std::string_view name, DType value) {
  add(name, "fovea::core::DType::" + std::string(name_of(value)));
}

void ConfigText::softmax(SoftmaxPolicy value) {
  add("softmax", "fovea::core::SoftmaxPolicy::" + std::string(name_of(value)));
}

void ConfigText::transform(ScoreTransform value) {
  add("transform", "fovea::core::ScoreTransform::" + std::string(name_of(value)));
}

}  // namespace fovea::runtime
