#include "tools/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/tools/tools_support.h"

namespace fovea::test {
namespace {

using tools::ElementType;
using tools::parse_safetensors;

constexpr const char* two_tensors = R"({"__metadata__":{"layer":"3"},)"
                                    R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                                    R"("b":{"dtype":"I32","shape":[4],"data_offsets":[24,40]}})";

std::string fault(const Bytes& file) {
  return error_of([&] { static_cast<void>(parse_safetensors(file)); });
}

std::string fault(const std::string& header, std::size_t data_bytes) {
  return fault(safetensors_file(header, Bytes(data_bytes)));
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
  const Bytes file = safetensors_file(two_tensors, Bytes(40));
  const tools::Safetensors parsed = parse_safetensors(file);
  ASSERT_EQ(parsed.tensors.size(), 2u);
  const tools::Array& a = parsed.tensors.at("a");
  EXPECT_EQ(a.type, ElementType::f32);
  EXPECT_EQ(a.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(a.bytes.data(), file.data() + file.size() - 40);
  EXPECT_EQ(parsed.tensors.at("b").type, ElementType::i32);
  EXPECT_EQ(parsed.tensors.at("b").bytes.size(), 16u);
  EXPECT_EQ(parsed.metadata.at("layer"), "3");
}

TEST(Safetensors, ReadsEveryKnownType) {
  struct Row {
    const char* dtype;
    ElementType type;
    int size;
  };
  for (const Row& row : {Row{"F32", ElementType::f32, 4}, Row{"F16", ElementType::f16, 2},
                         Row{"BF16", ElementType::bf16, 2}, Row{"F64", ElementType::f64, 8},
                         Row{"F8_E4M3", ElementType::e4m3, 1}, Row{"F8_E5M2", ElementType::e5m2, 1},
                         Row{"I64", ElementType::i64, 8}, Row{"BOOL", ElementType::boolean, 1},
                         Row{"U16", ElementType::other, 2}}) {
    const std::string header = fmt::format(
        R"({{"t":{{"dtype":"{}","shape":[3],"data_offsets":[0,{}]}}}})", row.dtype, 3 * row.size);
    const Bytes file = safetensors_file(header, Bytes(static_cast<std::size_t>(3 * row.size)));
    EXPECT_EQ(parse_safetensors(file).tensors.at("t").type, row.type) << row.dtype;
    EXPECT_NE(fault(header, static_cast<std::size_t>(3 * row.size) - 1), "") << row.dtype;
  }
}

TEST(Safetensors, ReadsTrailingSpacesScalarsAndEmptyTensors) {
  EXPECT_EQ(fault(std::string(two_tensors) + "     ", 40), "");
  EXPECT_EQ(fault("{}", 0), "");
  EXPECT_EQ(fault(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4), "");
  EXPECT_EQ(fault(R"({"e":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]}})", 0), "");
  // A type that came after this reader: there, but not interpreted.
  EXPECT_EQ(fault(R"({"n":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}})", 4), "");
}

TEST(Safetensors, RefusesEveryTruncation) {
  const Bytes whole = safetensors_file(two_tensors, Bytes(40));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(fault(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))), "")
        << size << " bytes";
  }
}

TEST(Safetensors, RefusesWhatBreaksTheFormat) {
  struct Row {
    const char* header;
    const char* expected;
  };
  const Row rows[] = {
      {R"([1,2])", "not a JSON object"},
      {R"({"a":)", "not valid JSON"},
      {"{\"a\xff\":1}", "not valid JSON"},
      {R"({"a":1})", "no object"},
      {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", "'dtype'"},
      {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", "'dtype'"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", "'shape'"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "'shape'"},
      {R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", "'shape'"},
      {R"({"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})", "'shape'"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "'data_offsets'"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[36,44]}})", "data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})",
       "'data_offsets'"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "needs 12 bytes"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", "64-bit"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
       "overlap"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
       "twice"},
      {R"({"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})", "twice"},
      {R"({"a":{"dtype":"F32","shape":[[[2]]],"data_offsets":[0,8]}})", "nests"},
      {R"({"__metadata__":{"x":1}})", "__metadata__"},
      {R"({"__metadata__":[]})", "__metadata__"},
  };
  for (const Row& row : rows) {
    const std::string message = fault(row.header, 40);
    EXPECT_NE(message.find(row.expected), std::string::npos)
        << row.header << ": " << row.expected << " is not in: " << message;
  }
}

TEST(Safetensors, BelievesNoHeaderLengthBeyondTheFile) {
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    Bytes file = bytes_of_values(std::vector<std::uint64_t>{length});
    file.push_back(std::byte{'{'});
    file.push_back(std::byte{'}'});
    EXPECT_NE(fault(file).find("header of"), std::string::npos) << length;
  }
}

TEST(Safetensors, StopsAtDepth) {
  EXPECT_NE(fault(std::string(1000000, '['), 0).find("nests"), std::string::npos);
}

}  // namespace
}  // namespace fovea::test
