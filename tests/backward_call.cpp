#include "tests/backward_call.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cpu/reference.h"
#include "tests/tolerance.h"

namespace fovea::test {
namespace {

// The backward pass reads lse.
CaseSpec with_lse(CaseSpec spec) {
  spec.lse = true;
  return spec;
}

core::View to_view(const HostTensor& tensor) {
  core::View view;
  if (!tensor.present()) return view;
  view.data = tensor.tensor().data;
  view.dtype = static_cast<core::DType>(tensor.dtype());
  for (std::size_t i = 0; i < 4; ++i) {
    view.stride[i] = tensor.shape()[i] == 1 ? 0 : tensor.tensor().stride[i];
  }
  return view;
}

// Written apart from the runtime's own translation.
core::Gradients to_core(const BackwardCall& call) {
  core::Gradients g;
  g.dout = to_view(call.dout);
  g.dlse = to_view(call.dlse);
  g.dq = to_view(call.dq);
  g.dk = to_view(call.dk);
  g.dv = to_view(call.dv);
  g.dsink = to_view(call.dsink);
  g.dbias = to_view(call.dbias);
  if (call.dbias.present()) {
    std::copy(call.dbias.shape().begin(), call.dbias.shape().end(), g.dbias_extent);
  }
  g.rows_k = call.call.k.shape()[1];
  return g;
}

}  // namespace

bool is_paged(const CaseSpec& spec) {
  return spec.entry == Entry::paged || spec.entry == Entry::varlen_paged;
}

BackwardCall::BackwardCall(const CaseSpec& spec, const GradientSpec& gradient_spec)
    : call(with_lse(spec)) {
  allocate(gradient_spec);
  Random random(99);
  const CaseSpec& s = call.spec;
  for (Index b = 0; b < s.batch; ++b) {
    for (Index i = 0; i < call.length_q(b); ++i) {
      const Call::Place place = call.row_q(b, i);
      for (Index h = 0; h < s.hq; ++h) {
        for (Index d = 0; d < s.dv; ++d) {
          const double value = gradient_spec.plain_dout ? 1.0 : random.normal();
          dout.set(place.batch, place.row, h, d, value);
        }
        if (dlse.present()) dlse.set(place.batch, h, place.row, 0, random.normal());
      }
    }
  }
}

void BackwardCall::allocate(const GradientSpec& gradient_spec) {
  const Layout layout = call.spec.layout;
  const auto like = [&](const HostTensor& tensor, bool wide) {
    return laid_out(wide ? DType::f32 : tensor.dtype(), tensor.shape(), layout);
  };
  dout = gradient_spec.plain_dout ? HostTensor(call.out.dtype(), call.out.shape(),
                                               {.broadcast = {true, true, true, true}})
                                  : like(call.out, false);
  if (gradient_spec.dlse) dlse = like(call.lse, true);
  dq = like(call.q, gradient_spec.wide);
  dk = like(call.k, gradient_spec.wide);
  dv = like(call.v, gradient_spec.wide);
  if (call.sink.present() && gradient_spec.dsink) dsink = like(call.sink, true);
  if (call.bias.present() && gradient_spec.dbias) dbias = like(call.bias, gradient_spec.wide);
  gradients = {dout.tensor(), dlse.tensor(),  dq.tensor(),   dk.tensor(),
               dv.tensor(),   dsink.tensor(), dbias.tensor()};
}

void BackwardCall::run() {
  call.run();
  run_backward();
}

void BackwardCall::run_backward() {
  for (HostTensor* tensor : {&dq, &dk, &dv, &dsink, &dbias}) {
    if (tensor->present()) tensor->poison();
  }
  Options options;
  options.device = device;
  options.threads = threads;
  const BackwardPlan plan = plan_backward(call.problem, gradients, options);
  const HostTensor workspace(DType::boolean, {1, 1, 1, static_cast<Index>(plan.workspace_bytes())},
                             {.offset = 1});
  plan.run(call.problem, gradients,
           {static_cast<std::byte*>(workspace.tensor().data), plan.workspace_bytes()});
  EXPECT_EQ(workspace.foreign_bytes_changed(), 0) << "beside the workspace";
}

void BackwardCall::expect_memory_respected() const {
  call.expect_memory_respected();
  EXPECT_EQ(dq.foreign_bytes_changed(), 0) << "beside dq";
  EXPECT_EQ(dk.foreign_bytes_changed(), 0) << "beside dk";
  EXPECT_EQ(dv.foreign_bytes_changed(), 0) << "beside dv";
  EXPECT_EQ(dsink.foreign_bytes_changed(), 0) << "beside dsink";
  EXPECT_EQ(dbias.foreign_bytes_changed(), 0) << "beside dbias";
}

void BackwardCall::expect_matches_oracle() const {
  const core::Problem p = test::to_core(call.problem);
  const core::Gradients g = to_core(*this);
  const cpu::ReferenceGradients exact = cpu::reference_backward(p, g);
  const cpu::ReferenceGradients naive = cpu::naive_backward(p, g);
  const auto compare = [&](const char* name, const HostTensor& found,
                           const std::vector<double>& truth, const std::vector<double>& same) {
    if (!found.present()) return;
    EXPECT_TRUE(
        close_to(found.values(), truth, same, gradient_floor(call.q.dtype(), found.dtype(), truth)))
        << name;
  };
  compare("dq", dq, exact.dq, naive.dq);
  compare("dk", dk, exact.dk, naive.dk);
  compare("dv", dv, exact.dv, naive.dv);
  compare("dsink", dsink, exact.dsink, naive.dsink);
  compare("dbias", dbias, exact.dbias, naive.dbias);
}

std::vector<std::byte> BackwardCall::bytes() const {
  std::vector<std::byte> all;
  for (const HostTensor* tensor : {&dq, &dk, &dv, &dsink, &dbias}) {
    if (!tensor->present()) continue;
    const std::vector<std::byte> part = tensor->bytes();
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

void check_backward_case(const CaseSpec& spec, const GradientSpec& gradient_spec) {
  SCOPED_TRACE(describe(spec));
  BackwardCall backward(spec, gradient_spec);
  backward.call.poison_unseen();
  backward.run();
  backward.expect_memory_respected();
  backward.expect_matches_oracle();
  const std::vector<std::byte> bytes = backward.bytes();
  backward.run_backward();
  EXPECT_TRUE(same_bits(backward.bytes(), bytes)) << "gradients of a second run";
}

}  // namespace fovea::test
