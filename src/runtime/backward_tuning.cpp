#include "runtime/backward_tuning.h"

#include <algorithm>
#include <span>

#include "fovea/device.hpp"
#include "runtime/backward.h"
#include "runtime/backward_gpu.h"
#include "runtime/gradients.h"
#include "runtime/problem.h"
#include "runtime/settings.h"
#include "runtime/staging.h"
#include "runtime/text.h"

namespace fovea::runtime {

namespace {

using core::BwdConfig;

struct Switch {
  std::string_view name;
  bool BwdConfig::*flag;
};

constexpr Switch hopper_switches[] = {{"split_products", &BwdConfig::split_products},
                                      {"dq_apart", &BwdConfig::dq_apart}};
constexpr Switch blackwell_switches[] = {{"pair", &BwdConfig::pair}};

std::span<const Switch> switches_of(const BwdConfig& c) {
  if (c.tensor_memory) return blackwell_switches;
  return hopper_switches;
}

void set_switch(BwdConfig& config, std::string_view name, std::string_view value) {
  std::string known;
  for (const Switch& entry : switches_of(config)) {
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
    if (entry.name != name) continue;
    require(value == "0" || value == "1", "configuration gives ", name, " the value '", value,
            "'; it must be 0 or 1");
    config.*entry.flag = value == "1";
    if (config.split_products && entry.flag == &BwdConfig::split_products) config.dq_apart = false;
    return;
  }
  throw Error(text("configuration names '", name, "'; this kernel has ", known));
}

}  // namespace

void override_backward(BwdConfig& config, std::string_view text_given) {
  for_each_setting(text_given, [&](std::string_view name, std::string_view value) {
    set_switch(config, name, value);
  });
}

std::string backward_switches(const BwdConfig& config) {
  std::string result;
  for (const Switch& entry : switches_of(config)) {
    result += text(result.empty() ? "" : ",", entry.name, "=", config.*entry.flag ? 1 : 0);
  }
  return result;
}

std::string backward_objection(const BwdConfig& c) {
  if (c.tensor_memory) {
    return c.pair && c.head_dim != 128 ? "pair=1 needs head dimensions from 65 to 128" : "";
  }
  if (!c.split_products && (c.head_dim > 128 || c.head_dim_v > 128)) {
    return text("head dimensions of ", c.head_dim, " and ", c.head_dim_v, " need split_products=1");
  }
  if (c.dq_apart && !core::fits_dq_apart(c)) {
    return "dq_apart=1 needs split_products=0, head dimensions up to 64 and scores that nothing "
           "modifies";
  }
  return {};
}

std::vector<BwdConfig> backward_variants(const BwdConfig& chosen) {
  const std::span<const Switch> switches = switches_of(chosen);
  std::vector<BwdConfig> list{chosen};
  for (unsigned set = 0; set < 1u << switches.size(); ++set) {
    BwdConfig c = chosen;
    for (std::size_t i = 0; i < switches.size(); ++i) c.*switches[i].flag = (set >> i & 1u) != 0;
    if (!(c == chosen) && backward_objection(c).empty()) list.push_back(c);
  }
  return list;
}

}  // namespace fovea::runtime

namespace fovea {

std::vector<std::string> backward_configurations(const Problem& problem, const Gradients& gradients,
                                                 std::string_view arch) {
  const core::Problem validated = validate(problem);
  const core::Gradients validated_gradients = validate(problem, gradients);
  const std::vector<std::string> reasons =
      runtime::backward_supports(validated, validated_gradients, arch);
  if (!reasons.empty()) throw Unsupported("no configuration: " + reasons.front());
  std::vector<std::string> list;
  for (const core::BwdConfig& c :
       runtime::backward_variants(runtime::choose_backward(validated, validated_gradients, arch))) {
    list.push_back(runtime::backward_switches(c));
  }
  return list;
}

}  // namespace fovea
