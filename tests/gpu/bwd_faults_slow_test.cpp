// Fault injection into Hopper's backward kernel: waits, arrivals, fences and barriers broken once
// each, and run by the emulator, every so many of them, or all (FOVEA_ALL_FAULTS=1). Prints a
// table, and every fault that goes unnoticed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "runtime/backward_gpu.h"
#include "tests/gpu/backward_bench.h"

namespace fovea::tests {
namespace {

// Which of the kernel's waits and fences stand for each other, too: docs/kernels/bwd_sm90.md.
constexpr Explained harmless[] = {
    {"barrier: warp", "__syncwarp();", "the emulator runs the lanes of a warp together"},
    {"commit: bulk", "bulk_commit();", "the commit of the next unit takes it along"},
    {"fence: proxy", "bwd_wait_added();",
     "the wait shows the sums to this thread, and who takes the turn fences"},
    {"wait: mbarrier", "hand_turn_over();",
     "no order keeps the passing thread waiting for two steps of the others"},
    {"fence: proxy", "publish_cleared();", "what is cleared later is fenced, or there is nothing"},
    {"barrier", "publish_cleared();", "the clearing of rows follows"},
    {"fence: wgmma", "issue_dp(dscores);", "of dP nothing is written since the fence before S"},
    {"fence: wgmma", "issue_dv(weights);", "the fence before dP comes behind the weights"},
    {"fence: wgmma", "this->publish_scores();", "the fence before dv comes behind dS"},
    {"fence: wgmma", "mbarrier_arrive(plan.scores_ring.full",
     "the fence before dv comes behind dS"},
    {"fence: wgmma", "issue(dq, 1);",
     "the emulator sees sums that are written in between, not those that are read"},
    {"wait: bulk", "BwdAdd<C>{plan, params}.run();",
     "the emulator keeps the memory of a CTA that has ended"},
    {"wait: bulk", "if (role == adds) bulk_wait<0>();",
     "the emulator keeps the memory of a CTA that has ended"},
    {"wait: bulk", "bulk_wait_read<Plan::dq_buffers - 1 - buffer>();",
     "the other warpgroup has waited for its later unit, and both have met"},
    {"wait: mbarrier", "this->clear_unseen_rows(at.block);",
     "the second warpgroup has no row to clear"},
    {"commit: wgmma", "issue_gradient<C>(dv, weights, this->dout_tile());",
     "the next commit takes it along; dout is given back before q, which the loader waits for "
     "first"},
    {"commit: wgmma", "issue_gradient<C>(dk, dweights, this->q_tile());",
     "the next commit takes it along, and both are waited for"},
    {"commit: wgmma", "issue_dq<C>(dq[j], scores_tile(), keys",
     "the next commit takes it along, and both are waited for"},
    {"fence: wgmma", "if constexpr (more) issue(scores, lse);",
     "of the scores nothing is written since the fence before dv"},
    {"fence: wgmma", "this->issue_own_dq(dq, own.begin);",
     "both operands are in shared memory, and the sums not written since the last fence"},
    {"fence: wgmma", "this->issue_peer_dq(dq, own.begin);",
     "both operands are in shared memory, and the sums not written since the last fence"},
    {"fence: proxy", "this->issue_peer_dq(dq, own.begin);",
     "the emulator counts st.async to the asynchronous proxy"},
    {"wait: wgmma", "step<false>(next);",
     "dout is given back before q, which the loader waits for first"},
    {"wait: mbarrier", "this->plan.scores_ring.wait_free(this->scores_state);",
     "dS of the step before comes from warps that had read those, or keys of this block from warps "
     "that had read all of the last one"},
    {"wait: mbarrier", "this->plan.dout_ring.wait_full(dout);",
     "the last rows end inside a tile: who clears them has waited"},
    {"wait: mbarrier", "this->plan.q_ring.wait_full(this->q_state);",
     "without a mask only products read these rows there, and P of them has been waited for"},
    {"wait: mbarrier", "this->wait_keys();",
     "the other warpgroup has waited, and both meet to clear keys"},
    {"wait: mbarrier", "plan.work_ring.wait_free(work_state);",
     "rows of the last block were given back by warps that had done with the one before, and dq's "
     "buffers by the thread that adds"},
    {"wait: mbarrier", "plan.index_ring.wait_free(index_state);",
     "both CTAs have exchanged dS of the last block since"},
    {"wait: mbarrier", "Ring<1>::wait(this->plan.dscores_full",
     "the emulator runs a product when all four warps have issued it"},
    {"barrier", "named_barrier_sync<Plan::dscores_barrier, 128>();",
     "the emulator runs a product when all four warps have issued it"},
    {"wait: mbarrier", "plan.scores_ring.wait_free(this->q_state);",
     "q of this step was asked for when dq had read those scores"},
    {"wait: mbarrier", "if constexpr (!together) issue_dp(dscores);", "delta has been waited for"},
    {"wait: mbarrier", "plan.scores_ring.wait_free(other);",
     "dq is made in order: the wait for the last scores is one for those before"},
    {"wait: mbarrier", "BwdDq<C>{plan, params}.run();",
     "the scores that dq is made of were made of these keys"},
    {"wait: mbarrier", "if (role == loads) load.publish();", "the first use of the ring"},
    {"wait: mbarrier", "load.publish();",
     "the computing warps have handed over scores of the block behind it"},
    {"wait: mbarrier", "if (role == loads) load.load_keys();",
     "the computing warps have handed over the last scores of these keys"},
    {"wait: mbarrier", "load_rows(plan.q_ring, q_state",
     "the wait for the memory of keys is one for all rows that met them"},
    {"wait: mbarrier", "load_rows(plan.dout_ring, dout_state",
     "dout's ring is as deep as q's, and given back earlier"},
    {"wait: wgmma", "wgmma_wait<1>();",
     "dout is given back before q, which the loader waits for first"},
};

struct FaultCase {
  const char* name;
  bool turns;
  bool apart;  // dq has a warpgroup of its own
  std::vector<BackwardRun> runs;
};

class HopperBackwardFaults : public testing::TestWithParam<FaultCase> {};

TEST_P(HopperBackwardFaults, AreReported) {
  const FaultCase& tested = GetParam();
  BackwardInputs inputs(tested.runs[0].shape);
  inputs.problem.deterministic = tested.turns;
  core::BwdConfig config = runtime::choose_backward(inputs.problem, inputs.gradients, "sm_90a");
  config.dq_apart = tested.apart;
  const BackwardFaultBench bench("emulated:sm_90a", config, tested.runs);
  const bool every = std::getenv("FOVEA_ALL_FAULTS") != nullptr;
  const FaultTable::Row all = bench.break_kernel(every ? 1 : 12, harmless).all();
  EXPECT_EQ(all.wrong_only, 0) << "a wrong result must not pass unreported";
  EXPECT_EQ(all.reported + all.explained, all.total);
  EXPECT_GT(all.total, 5);
  // A sixth of all are meetings of a warp's lanes, and a sample of few may be less lucky.
  EXPECT_GE(100 * all.reported, (every ? 70 : 50) * all.total);
}

constexpr core::Window causal = {-1, 0};

// On a chip of one multiprocessor all blocks of keys fall to one CTA, so that every ring goes round
// from block to block; on two, CTAs take turns. Rows and keys end inside tiles, so that the
// clearing of them can be broken. Without turns no more than two blocks of keys add to a row.
INSTANTIATE_TEST_SUITE_P(
    Forms, HopperBackwardFaults,
    testing::Values(
        FaultCase{"d128_turns",
                  true,
                  false,
                  {{{.seqlen_q = 200, .seqlen_k = 300, .window = causal}, 1},
                   {{.seqlen_q = 128, .seqlen_k = 576, .window = causal}, 1},
                   {{.seqlen_q = 200, .seqlen_k = 300, .window = causal}, 2}}},
        FaultCase{"d128",
                  false,
                  false,
                  {{{.seqlen_q = 170, .seqlen_k = 200, .heads = 2}, 1},
                   {{.seqlen_q = 100, .seqlen_k = 250, .heads = 2}, 1}}},
        FaultCase{"d64_turns",
                  true,
                  false,
                  {{{.seqlen_q = 300, .seqlen_k = 300, .head_dim = 64, .head_dim_v = 64}, 1},
                   {{.seqlen_q = 100, .seqlen_k = 600, .head_dim = 64, .head_dim_v = 64}, 1},
                   {{.seqlen_q = 300, .seqlen_k = 300, .head_dim = 64, .head_dim_v = 64}, 2}}},
        FaultCase{"d64_apart_turns",
                  true,
                  true,
                  {{{.seqlen_q = 300, .seqlen_k = 300, .head_dim = 64, .head_dim_v = 64}, 1},
                   {{.seqlen_q = 100, .seqlen_k = 600, .head_dim = 64, .head_dim_v = 64}, 1},
                   {{.seqlen_q = 300, .seqlen_k = 300, .head_dim = 64, .head_dim_v = 64}, 2}}},
        FaultCase{"d64_apart",
                  false,
                  true,
                  {{{.seqlen_q = 300,
                     .seqlen_k = 200,
                     .head_dim = 64,
                     .head_dim_v = 64,
                     .window = causal,
                     .heads = 2},
                    1},
                   {{.seqlen_q = 100,
                     .seqlen_k = 250,
                     .head_dim = 64,
                     .head_dim_v = 64,
                     .window = causal,
                     .heads = 2},
                    1}}},
        FaultCase{"d192_turns",
                  true,
                  false,
                  {{{.seqlen_q = 140, .seqlen_k = 150, .head_dim = 192}, 1},
                   {{.seqlen_q = 60, .seqlen_k = 330, .head_dim = 192}, 1},
                   {{.seqlen_q = 140, .seqlen_k = 150, .head_dim = 192}, 2}}},
        FaultCase{"d192",
                  false,
                  false,
                  {{{.seqlen_q = 140, .seqlen_k = 100, .head_dim = 192, .heads = 2}, 1},
                   {{.seqlen_q = 60, .seqlen_k = 120, .head_dim = 192, .heads = 2}, 1}}},
        FaultCase{
            "d256",
            false,
            false,
            {{{.seqlen_q = 140, .seqlen_k = 100, .head_dim = 256, .head_dim_v = 256, .heads = 2},
              1},
             {{.seqlen_q = 60, .seqlen_k = 120, .head_dim = 256, .head_dim_v = 256, .heads = 2},
              1}}},
        FaultCase{"d256_turns",
                  true,
                  false,
                  {{{.seqlen_q = 140, .seqlen_k = 280, .head_dim = 256, .window = causal}, 1},
                   {{.seqlen_q = 60, .seqlen_k = 400, .head_dim = 256}, 1},
                   {{.seqlen_q = 140, .seqlen_k = 280, .head_dim = 256, .window = causal}, 4}}}),
    [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace fovea::tests
