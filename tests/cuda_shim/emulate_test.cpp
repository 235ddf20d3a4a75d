// `fovea emulate` on a program of the CUDA runtime that was built without CUDA.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/tools/tools_support.h"

#ifdef FOVEA_PROGRAM

namespace fovea::test {
namespace {

using Json = nlohmann::json;

class Emulate : public ::testing::Test {
 protected:
  struct Ended {
    int status = -1;
    std::string out, err;
  };

  Ended run(const std::string& arguments) const {
    const std::string command =
        fmt::format("cd '{}' && '{}' emulate {} >'{}' 2>'{}' </dev/null", files_.path("."),
                    FOVEA_PROGRAM, arguments, files_.path("out"), files_.path("err"));
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text("out"), text("err")};
  }
  std::string text(const std::string& name) const {
    const Bytes bytes = read_file(files_.path(name));
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  TemporaryDirectory files_;
};

TEST_F(Emulate, RunsAProgramFromEveryKindOfFatBinary) {
  for (const std::string packing : {"plain", "lz4", "zstd"}) {
    for (const std::string order : {"eager", "lazy", "random --seed 5"}) {
      const Ended ended = run(fmt::format("--order {} -- '{}' {}", order, FOVEA_GUEST, packing));
      EXPECT_EQ(ended.status, 0) << ended.err;
      EXPECT_EQ(ended.out, "tile 16\npassed\n") << ended.err;
      EXPECT_NE(ended.err.find("neighbours"), std::string::npos) << ended.err;
    }
  }
}

TEST_F(Emulate, ReportsAFaultWithItsLineAndFails) {
  const Ended ended = run(fmt::format("--json report.json -- '{}' zstd racy", FOVEA_GUEST));
  EXPECT_EQ(ended.status, 1);
  EXPECT_EQ(ended.out, "tile 16\npassed\n");
  EXPECT_NE(ended.err.find("racy: race, PTX line 129"), std::string::npos) << ended.err;
  const Json report = Json::parse(text("report.json"));
  EXPECT_EQ(report.at("findings"), 1);
  EXPECT_EQ(report.at("status"), 0);
  EXPECT_EQ(report.at("launches").size(), 4u);
  EXPECT_EQ(report.at("launches")[3].at("report").at("faults")[0].at("kind"), "race");
  const Json& scale = report.at("kernels")[0];
  EXPECT_EQ(scale.at("name"), "scale");
  EXPECT_EQ(scale.at("ctas"), 4);
  EXPECT_EQ(scale.at("total").at("fma_lanes"), 1000);
  EXPECT_EQ(report.at("kernels")[1].at("total").at("tma_load_bytes"), 1024);

  EXPECT_EQ(run(fmt::format("--no-check -- '{}' zstd racy", FOVEA_GUEST)).status, 0);
  const Ended stopped = run(fmt::format("--stop -- '{}' zstd racy", FOVEA_GUEST));
  EXPECT_EQ(stopped.status, 1);
  EXPECT_EQ(stopped.out, "tile 16\n");
}

TEST_F(Emulate, LimitsTheCtas) {
  const Ended ended = run(fmt::format("--ctas 2 --quiet -- '{}' plain", FOVEA_GUEST));
  EXPECT_EQ(ended.status, 3);  // the program sees that its grid was cut short
  EXPECT_EQ(ended.out, "FAILED: scale\n");
}

TEST_F(Emulate, SaysWhatIsMissing) {
  const Ended other_chip = run(fmt::format("--device emulated:sm_100a -- '{}' plain", FOVEA_GUEST));
  EXPECT_EQ(other_chip.status, 3);
  EXPECT_NE(other_chip.err.find("carries no PTX for sm_100a but machine code for sm_90, PTX for "
                                "sm_90a"),
            std::string::npos)
      << other_chip.err;
  const Ended no_cuda = run("-- true");
  EXPECT_EQ(no_cuda.status, 2);
  EXPECT_NE(no_cuda.err.find("-cudart shared"), std::string::npos);
  const Ended no_program = run("-- ./not-there");
  EXPECT_EQ(no_program.status, 2);
  EXPECT_NE(no_program.err.find("cannot start './not-there'"), std::string::npos);
  const Ended no_chip = run(fmt::format("--device emulated:sm_70 -- '{}' plain", FOVEA_GUEST));
  EXPECT_NE(no_chip.status, 0);
  EXPECT_NE(no_chip.err.find("'sm_70' is not a chip known here"), std::string::npos);
}

}  // namespace
}  // namespace fovea::test

#endif
