// From the caller's Problem to the validated one that backends compute.
#pragma once

#include <array>
#include <string_view>

#include "core/types.h"
#include "fovea/fovea.hpp"
#include "runtime/lengths.h"

namespace fovea {

inline constexpr std::int64_t max_head_dim = 576;    // of q and k
inline constexpr std::int64_t max_head_dim_v = 512;  // of v and out
inline constexpr int max_threads = 1024;             // more than any machine today has

// The tensors of a problem, for whatever is done to each of them alike.
struct Argument {
  std::string_view name;
  Tensor Problem::*tensor;
  bool is_output = false;
};
inline constexpr std::array<Argument, 13> arguments{{{"q", &Problem::q},
                                                     {"k", &Problem::k},
                                                     {"v", &Problem::v},
                                                     {"out", &Problem::out, true},
                                                     {"lse", &Problem::lse, true},
                                                     {"bias", &Problem::bias},
                                                     {"mask", &Problem::mask},
                                                     {"sink", &Problem::sink},
                                                     {"alibi", &Problem::alibi},
                                                     {"q_scale", &Problem::q_scale},
                                                     {"k_scale", &Problem::k_scale},
                                                     {"v_scale", &Problem::v_scale},
                                                     {"key_scale", &Problem::key_scale}}};

// Throws Error at the first fault. Reads the lengths and, of the block table, the entries in use,
// where they are in host memory; no tensor data. Allocates nothing unless it throws.
[[nodiscard]] core::Problem validate(const Problem& problem);

// Throws Error unless the problem lies in host memory, where `reader`, "the reference" say, reads.
void require_host_memory(const Problem& problem, std::string_view reader);

// The shape of v as k has it, whatever its layout.
[[nodiscard]] std::array<std::int64_t, 4> value_shape(const Problem& problem);

// The same without the checks, for a problem whose extents are known.
[[nodiscard]] core::Problem translate(const Problem& problem, const Extents& extents);

}  // namespace fovea
