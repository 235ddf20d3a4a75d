// The fuzzers' targets under a driver that needs no compiler support and gives the same inputs
// every time: seeds, changed at random.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/fuzz/fuzz_targets.h"
#include "tests/fuzz/seeds.h"

namespace fovea::test {
namespace {

class Mutator {
 public:
  Mutator(const Seeds& seeds, std::uint64_t seed) : seeds_(seeds), random_(seed) {}

  std::string next() {
    std::string text = pick(seeds_.inputs);
    const std::size_t changes = 1 + below(4);
    for (std::size_t i = 0; i < changes; ++i) change(text);
    return text;
  }

 private:
  std::size_t below(std::size_t bound) { return bound == 0 ? 0 : random_() % bound; }

  const std::string& pick(const std::vector<std::string>& list) { return list[below(list.size())]; }

  void change(std::string& text) {
    const std::size_t at = below(text.size() + 1);
    const std::size_t length = std::min(below(16), text.size() - at);
    switch (below(8)) {
      case 0:  // one bit
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:  // one byte
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 2: text.insert(at, 1, static_cast<char>(below(256))); break;
      case 3: text.erase(at, length); break;
      case 4: text.resize(at); break;
      case 5: text.insert(at, pick(seeds_.words)); break;
      case 6: text.replace(at, length, pick(seeds_.words)); break;
      default: {  // the tail of another seed
        const std::string& other = pick(seeds_.inputs);
        text = text.substr(0, at) + other.substr(below(other.size() + 1));
        break;
      }
    }
  }

  const Seeds& seeds_;
  std::mt19937_64 random_;
};

void drive(const Seeds& seeds, void (*target)(std::span<const std::byte>), int count) {
  for (const std::string& seed : seeds.inputs) {
    ASSERT_NO_THROW(target(std::as_bytes(std::span(seed)))) << seed;
  }
  Mutator mutator(seeds, 1);
  for (int i = 0; i < count; ++i) {
    const std::string text = mutator.next();
    // A copy of exactly this size: a sanitizer sees a read beyond it.
    const std::vector<char> exact(text.begin(), text.end());
    ASSERT_NO_THROW(target(std::as_bytes(std::span(exact))))
        << "input " << i << ": " << ::testing::PrintToString(text);
  }
}

// Building the option parser is slow under a sanitizer.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int option_inputs = 4000;
#else
constexpr int option_inputs = 20000;
#endif

TEST(Fuzz, Npy) { drive(npy_seeds(), fuzz_npy, 20000); }
TEST(Fuzz, Safetensors) { drive(safetensors_seeds(), fuzz_safetensors, 20000); }
TEST(Fuzz, Ptx) { drive(ptx_seeds(), fuzz_ptx, 2000); }
TEST(Fuzz, Options) { drive(options_seeds(), fuzz_options, option_inputs); }

}  // namespace
}  // namespace fovea::test
