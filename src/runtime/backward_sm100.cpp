// The backward kernel for Blackwell: what of a configuration is its own, and its products.
#include "core/config_backward_sm100.h"
#include "runtime/backward_gpu.h"
#include "runtime/source.h"

namespace fovea::runtime {

bool is_blackwell(std::string_view arch) { return arch == "sm_100a" || arch == "sm_103a"; }

void choose_backward_sm100(core::BwdConfig& c, const core::Problem& p) {
  const core::HeadDims dims = core::backward_head_dims_sm100(p.head_dim, p.head_dim_v);
  c.tensor_memory = true;
  c.split_products = false;
  c.head_dim = dims.qk;
  c.head_dim_v = dims.v;
  // A pair's k, q and dout twice over leave no room for more than 128 columns; below 128 a half of
  // the columns is no whole panel.
  c.pair = c.head_dim == 128 && p.seqlen_k > core::keys_of(c);
}

std::vector<std::string> backward_products_sm100() {
  std::vector<std::string> texts;
  for (const int cta_group : {1, 2}) {
    texts.push_back(tcgen05_mma_text({.cta_group = cta_group}));
    texts.push_back(tcgen05_mma_text({.a_in_tensor_memory = true, .cta_group = cta_group}));
  }
  for (const int words : {16, 32}) texts.push_back(tcgen05_load_text(words));
  for (const int words : {8, 16}) texts.push_back(tcgen05_store_text(words));
  return texts;
}

}  // namespace fovea::runtime
