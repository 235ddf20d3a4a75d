// From the caller's Gradients to the validated ones that backends compute.
#pragma once

#include <array>
#include <string_view>

#include "core/types.h"
#include "fovea/fovea.hpp"

namespace fovea {

// The tensors of Gradients, for whatever is done to each of them alike.
struct GradientArgument {
  std::string_view name;
  Tensor Gradients::*tensor;
  core::View core::Gradients::*view;
  bool is_output = false;
};
inline constexpr std::array<GradientArgument, 7> gradient_arguments{
    {{"dout", &Gradients::dout, &core::Gradients::dout},
     {"dlse", &Gradients::dlse, &core::Gradients::dlse},
     {"dq", &Gradients::dq, &core::Gradients::dq, true},
     {"dk", &Gradients::dk, &core::Gradients::dk, true},
     {"dv", &Gradients::dv, &core::Gradients::dv, true},
     {"dsink", &Gradients::dsink, &core::Gradients::dsink, true},
     {"dbias", &Gradients::dbias, &core::Gradients::dbias, true}}};

// Throws Error at the first fault of the gradients, beside a problem that validate() accepted.
// Reads no tensor data; allocates nothing unless it throws.
[[nodiscard]] core::Gradients validate(const Problem& problem, const Gradients& gradients);

// The same without the checks.
[[nodiscard]] core::Gradients translate(const Problem& problem, const Gradients& gradients);

}  // namespace fovea
