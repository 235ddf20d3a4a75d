#include "tools/npy.h"

#include <gtest/gtest.h>

#include "tests/tools/tools_support.h"

namespace fovea::test {
namespace {

using tools::ElementType;
using tools::parse_npy;

Bytes zeros(std::size_t count) { return Bytes(count); }

std::string fault(const Bytes& file) {
  return error_of([&] { static_cast<void>(parse_npy(file)); });
}

TEST(Npy, ReadsTypesShapesAndVersions) {
  struct Row {
    const char* descr;
    ElementType type;
    std::size_t size;
  };
  for (const Row& row : {Row{"<f4", ElementType::f32, 4}, Row{"<f2", ElementType::f16, 2},
                         Row{"<V2", ElementType::bf16, 2}, Row{"|V2", ElementType::bf16, 2},
                         Row{"<f8", ElementType::f64, 8}, Row{"<i4", ElementType::i32, 4},
                         Row{"<i8", ElementType::i64, 8}, Row{"|b1", ElementType::boolean, 1},
                         Row{"|u1", ElementType::u8, 1}}) {
    for (const int version : {1, 2, 3}) {
      const Bytes file = npy_file(row.descr, "(2, 3)", zeros(6 * row.size), version);
      const tools::Array array = parse_npy(file);
      EXPECT_EQ(array.type, row.type) << row.descr;
      EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 3}));
      EXPECT_EQ(array.bytes.data(), file.data() + file.size() - 6 * row.size);
    }
  }
}

TEST(Npy, ReadsScalarsVectorsAndEmptyArrays) {
  EXPECT_EQ(parse_npy(npy_file("<f4", "()", zeros(4))).elements(), 1);
  EXPECT_EQ(parse_npy(npy_file("<f4", "(5,)", zeros(20))).shape, (std::vector<std::int64_t>{5}));
  EXPECT_EQ(parse_npy(npy_file("<f4", "(5, 0, 3)", {})).elements(), 0);
}

TEST(Npy, WritesWhatItReads) {
  const std::vector<std::int64_t> shape = {1, 148, 12, 32};
  const std::string header = tools::npy_header(ElementType::f32, shape);
  EXPECT_EQ(header.size() % 64, 0u);
  EXPECT_EQ(header.back(), '\n');
  Bytes file = to_bytes(header);
  file.resize(file.size() + 148 * 12 * 32 * 4);
  const tools::Array array = parse_npy(file);
  EXPECT_EQ(array.shape, shape);
  EXPECT_EQ(array.type, ElementType::f32);
}

TEST(Npy, RefusesFortranOrderUnlessItIsTheSame) {
  EXPECT_NE(fault(npy_file("<f4", "(2, 3)", zeros(24), 1, "True")).find("Fortran order"),
            std::string::npos);
  EXPECT_EQ(fault(npy_file("<f4", "(1, 6)", zeros(24), 1, "True")), "");
}

TEST(Npy, RefusesEveryTruncation) {
  const Bytes whole = npy_file("<f4", "(2, 3)", zeros(24));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(fault(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))), "")
        << size << " bytes";
  }
  EXPECT_EQ(fault(whole), "");
  Bytes longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_NE(fault(longer), "");
}

TEST(Npy, RefusesWhatItCannotRead) {
  struct Row {
    Bytes file;
    const char* expected;
  };
  const Row rows[] = {
      {npy_file(">f4", "(2, 3)", zeros(24)), "big-endian"},
      {npy_file("<c8", "(2, 3)", zeros(48)), "dtype '<c8'"},
      {npy_file("<V3", "(2, 3)", zeros(18)), "dtype '<V3'"},
      {npy_file("|O", "(2, 3)", zeros(24)), "dtype '|O'"},
      {npy_file("", "(2, 3)", zeros(24)), "dtype ''"},
      {npy_file("<f4", "(4611686018427387904, 4)", zeros(24)), "64-bit"},
      {npy_file("<f4", "(99999999999999999999,)", zeros(24)), "64 bits"},
      {npy_file("<f4", "(4611686018427387904, 4611686018427387904, 0)", {}), "64-bit"},
      {npy_file("<f4", "(1000000000000, 3)", zeros(24)), "truncated"},
      {npy_file("<f4", "(-2, 3)", zeros(24)), "malformed"},
      {npy_file("<f4", "(2, 3", zeros(24)), "malformed"},
      {npy_file("<f4", "[2, 3]", zeros(24)), "malformed"},
      {npy_file("<f4", "(2, 3)", zeros(24), 1, "1"), "malformed"},
      {npy_file("<f4", "(2, 3)", zeros(24), 4), "version 4"},
      {npy_file_with_header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}",
                            zeros(8)),
       "records"},
      {npy_file_with_header("{'descr': '<f4', 'shape': (2,)}", zeros(8)), "lacks"},
      {npy_file_with_header("{'descr': '<f4', 'descr': '<f4', 'shape': (2,)}", zeros(8)),
       "malformed"},
      {npy_file_with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} junk",
                            zeros(8)),
       "malformed"},
      {npy_file_with_header("", zeros(8)), "malformed"},
      {to_bytes("PK\x03\x04 an .npz archive"), "does not start"},
  };
  for (const Row& row : rows) {
    EXPECT_NE(fault(row.file).find(row.expected), std::string::npos)
        << row.expected << " is not in: " << fault(row.file);
  }
}

TEST(Npy, BelievesNoHeaderLengthBeyondTheFile) {
  Bytes file = to_bytes(std::string_view("\x93NUMPY\x02\x00\xff\xff\xff\xff{", 13));
  EXPECT_NE(fault(file).find("truncated"), std::string::npos);
}

}  // namespace
}  // namespace fovea::test
