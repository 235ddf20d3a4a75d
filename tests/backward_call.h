// The backward pass of a Call: its gradients in hostile memory, checked against the oracle's.
#pragma once

#include <vector>

#include "tests/call.h"

namespace fovea::test {

struct GradientSpec {
  bool dlse = false;
  bool dsink = true;        // where there is a sink
  bool dbias = true;        // where there is a bias
  bool wide = false;        // dq, dk, dv and dbias in fp32 whatever the inputs
  bool plain_dout = false;  // one number for all of dout, stride 0: that of out.sum()
};

class BackwardCall {
 public:
  // Allocates; dout and dlse are random normal numbers for the rows in use, NaN elsewhere.
  explicit BackwardCall(const CaseSpec& spec, const GradientSpec& gradient_spec = {});

  // The forward pass, which fills out and lse, then the backward pass in a guarded workspace.
  void run();
  void run_backward();  // the second alone

  // EXPECTs, after run(): gradients within the tolerance of the oracle, every element written, no
  // byte beside them changed.
  void expect_matches_oracle() const;
  void expect_memory_respected() const;

  // The bytes of all gradients, for repeatability.
  [[nodiscard]] std::vector<std::byte> bytes() const;

  Call call;
  HostTensor dout, dlse, dq, dk, dv, dsink, dbias;
  Gradients gradients;  // refers to this object's memory
  int threads = 0;
  Device device = test_device();  // of the backward pass

 private:
  void allocate(const GradientSpec& gradient_spec);
};

// Whether the backward pass declines the case, and rightly so.
[[nodiscard]] bool is_paged(const CaseSpec& spec);

// Builds the call, poisons what nobody sees, runs forward and twice backward, and checks all of it.
void check_backward_case(const CaseSpec& spec, const GradientSpec& gradient_spec = {});

}  // namespace fovea::test
