// What the configurations of the forward kernels have in common: filling their features from a
// problem, and writing them as C++ expressions. Internal to runtime/.
#pragma once

#include <string>
#include <string_view>

#include "core/config.h"
#include "core/types.h"

namespace fovea::runtime {

// Whether the copy engine takes out, and so the kernel may store tiles in one piece.
bool stores_tiles(const core::Problem& problem, core::DType dtype, core::DType out_dtype);

// Everything that follows from the problem and not from the chip.
template <typename Config>
void fill_features(Config& c, const core::Problem& p, core::SoftmaxPolicy softmax) {
  c.dtype = p.q.dtype;
  c.out_dtype = p.out.dtype;
  c.head_dim = core::round_up(p.head_dim, 16);
  c.head_dim_v = core::round_up(p.head_dim_v, 16);
  c.softmax = softmax;
  c.bound_right = p.window.right >= 0;
  c.bound_left = p.window.left >= 0;
  c.ragged = p.is_varlen_q() || p.is_varlen_k() || p.seqused_q != nullptr || p.seqused_k != nullptr;
  c.has_sink = static_cast<bool>(p.sink);
  if (p.softcap > 0.0f) {
    c.transform = core::ScoreTransform::softcap;
  } else if (!(p.softmax_scale > 0.0f)) {
    c.transform = core::ScoreTransform::scale;
  }
  c.tma_out = stores_tiles(p, c.dtype, c.out_dtype);
}

// A configuration as a C++ expression: "fovea::core::FwdConfig{.head_dim = 64, ...}". Fields come
// in the order of their declaration.
class ConfigText {
 public:
  explicit ConfigText(std::string_view type) : text_("fovea::core::" + std::string(type) + "{") {}

  void number(std::string_view name, int value) { add(name, std::to_string(value)); }
  void flag(std::string_view name, bool value) { add(name, value ? "true" : "false"); }
  void type(std::string_view name, core::DType value);
  void softmax(core::SoftmaxPolicy value);
  void transform(core::ScoreTransform value);
  std::string value() const { return text_ + "}"; }

 private:
  void add(std::string_view name, std::string_view value) {
    text_ += (text_.back() == '{' ? "." : ", .") + std::string(name) + " = " + std::string(value);
  }
  std::string text_;
};

}  // namespace fovea::runtime
