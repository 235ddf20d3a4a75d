#include "runtime/lengths.h"

#include <algorithm>

#include "runtime/tensor.h"
#include "runtime/text.h"

namespace fovea {
namespace {

using Lengths = std::span<const std::int32_t>;

// What describes the rows of one side of the problem, and the names its faults are reported under.
struct Side {
  std::string_view tensor_name;
  std::string_view cu_name;
  std::string_view used_name;
  std::string_view max_name;
  const Tensor& tensor;
  Lengths cu_seqlens;
  Lengths seqused;
  std::int64_t max_seqlen;
  bool readable;  // lengths in device memory are the caller's word
};

// The longest sequence, or a bound on it.
std::int64_t check_cumulative(const Side& side) {
  const Lengths cu = side.cu_seqlens;
  const std::int64_t total = side.tensor.shape[1];
  require(side.tensor.shape[0] == 1, side.tensor_name, " has shape ", Tuple{side.tensor.shape},
          ", but with ", side.cu_name, " its first extent must be 1: (1, total, heads, head_dim)");
  if (!side.readable) return total;
  require(cu[0] == 0, side.cu_name, " starts at ", cu[0], "; it must start at 0");
  std::int64_t longest = 0;
  for (std::size_t i = 1; i < cu.size(); ++i) {
    require(cu[i] >= cu[i - 1], side.cu_name, " decreases from ", cu[i - 1], " to ", cu[i],
            " at entry ", i, "; it must never decrease");
    longest = std::max(longest, std::int64_t{cu[i]} - cu[i - 1]);
  }
  require(cu.back() <= total, side.cu_name, " ends at ", cu.back(), " but ", side.tensor_name,
          " has ", total, " rows; it must end at ", total, " or before");
  return longest;
}

void check_used(const Side& side, std::int64_t batch, std::int64_t capacity,
                std::string_view holder) {
  const Lengths used = side.seqused;
  if (!is_given(used)) return;
  require(static_cast<std::int64_t>(used.size()) == batch, side.used_name, " has ", used.size(),
          " entries but there are ", batch, " sequences; it must have one entry for each");
  if (!side.readable) return;
  const bool varlen = is_given(side.cu_seqlens);
  for (std::size_t b = 0; b < used.size(); ++b) {
    const std::int64_t rows = varlen ? side.cu_seqlens[b + 1] - side.cu_seqlens[b] : capacity;
    require(used[b] >= 0 && used[b] <= rows, side.used_name, " is ", used[b], " at entry ", b,
            ", but ", holder, " has room for ", rows, "; it must lie in 0..", rows);
  }
}

// Rows per sequence: the extent of a dense tensor, or a bound on the lengths of a varlen one.
std::int64_t check_rows(const Side& side, std::int64_t batch) {
  require(side.max_seqlen >= 0 && side.max_seqlen <= max_extent, side.max_name, " is ",
          side.max_seqlen, "; it must lie in 0..", max_extent, ", where 0 means unknown");
  if (!is_given(side.cu_seqlens)) {
    const std::int64_t rows = side.tensor.shape[1];
    require(side.max_seqlen == 0 || side.max_seqlen == rows, side.max_name, " is ", side.max_seqlen,
            " but ", side.tensor_name, " is dense with ", rows,
            " rows per sequence; it bounds varlen lengths, so leave it 0");
    check_used(side, batch, rows, side.tensor_name);
    return rows;
  }
  const std::int64_t longest = check_cumulative(side);
  require(!side.readable || side.max_seqlen == 0 || longest <= side.max_seqlen, side.max_name,
          " is ", side.max_seqlen, " but the longest sequence of ", side.cu_name, " has ", longest,
          " rows; it must be at least that");
  check_used(side, batch, 0, "its sequence");
  return side.max_seqlen != 0 ? side.max_seqlen : longest;
}

// Entries beyond the used pages may hold anything.
void check_used_pages(const Problem& problem) {
  const std::int64_t pages = problem.k.shape[0];
  const std::int64_t page_size = problem.k.shape[1];
  for (std::size_t b = 0; b < problem.seqused_k.size(); ++b) {
    const std::int64_t used_pages = (problem.seqused_k[b] + page_size - 1) / page_size;
    const Lengths row =
        problem.block_table.subspan(b * static_cast<std::size_t>(problem.block_table_columns),
                                    static_cast<std::size_t>(used_pages));
    for (std::size_t i = 0; i < row.size(); ++i) {
      require(row[i] >= 0 && row[i] < pages, "block_table is ", row[i], " at row ", b, ", column ",
              i, ", but k has ", pages,
              " pages; entries that seqused_k uses must be less than that", " and not negative");
    }
  }
}

std::int64_t check_paged(const Problem& problem, const Side& keys, std::int64_t batch) {
  require(!is_given(problem.cu_seqlens_k),
          "cu_seqlens_k and block_table are both given; paged keys take their lengths from",
          " seqused_k alone");
  require(is_given(problem.seqused_k) || batch == 0,
          "seqused_k is absent but block_table is given; paged keys need the number of valid keys",
          " of each sequence");
  const std::int64_t columns = problem.block_table_columns;
  require(columns >= 0 && columns <= max_extent, "block_table_columns is ", columns,
          "; it must lie in 0..", max_extent);
  const auto entries = static_cast<std::int64_t>(problem.block_table.size());
  require(entries == batch * columns, "block_table has ", entries, " entries; ", batch,
          " sequences of block_table_columns = ", columns, " entries make ", batch * columns);
  const std::int64_t page_size = problem.k.shape[1];
  require(page_size > 0, "k has a page size of 0 (its second extent); it must be at least 1");
  require(problem.max_seqlen_k >= 0 && problem.max_seqlen_k <= max_extent, "max_seqlen_k is ",
          problem.max_seqlen_k, "; it must lie in 0..", max_extent, ", where 0 means unknown");
  const std::int64_t room = std::min(columns * page_size, max_extent);
  check_used(keys, batch, room, "a row of block_table");
  if (problem.max_seqlen_k != 0) check_used(keys, batch, problem.max_seqlen_k, "max_seqlen_k");
  if (keys.readable) check_used_pages(problem);
  return problem.max_seqlen_k != 0 ? problem.max_seqlen_k : room;
}

}  // namespace

bool is_given(Lengths lengths) { return lengths.data() != nullptr || !lengths.empty(); }

bool is_paged(const Problem& problem) {
  return is_given(problem.block_table) || problem.block_table_columns != 0;
}

Extents check_lengths(const Problem& problem) {
  for (const auto& [name, lengths] :
       {std::pair{"cu_seqlens_q", problem.cu_seqlens_q},
        std::pair{"cu_seqlens_k", problem.cu_seqlens_k}, std::pair{"seqused_q", problem.seqused_q},
        std::pair{"seqused_k", problem.seqused_k}, std::pair{"block_table", problem.block_table}}) {
    require(lengths.data() != nullptr || lengths.empty(), name, " has null data but ",
            lengths.size(), " entries; point it at them");
  }
  const bool readable = problem.memory == Memory::host;
  const Side queries{"q",       "cu_seqlens_q",       "seqused_q",       "max_seqlen_q",
                     problem.q, problem.cu_seqlens_q, problem.seqused_q, problem.max_seqlen_q,
                     readable};
  const Side keys{"k",       "cu_seqlens_k",       "seqused_k",       "max_seqlen_k",
                  problem.k, problem.cu_seqlens_k, problem.seqused_k, problem.max_seqlen_k,
                  readable};
  Extents extents;
  extents.batch = problem.q.shape[0];
  if (is_given(queries.cu_seqlens)) {
    require(!queries.cu_seqlens.empty(), "cu_seqlens_q has 0 entries; B sequences need B + 1");
    extents.batch = static_cast<std::int64_t>(queries.cu_seqlens.size()) - 1;
    require(extents.batch <= max_extent, "cu_seqlens_q describes ", extents.batch,
            " sequences; there may be at most ", max_extent);
  }
  extents.seqlen_q = check_rows(queries, extents.batch);
  if (is_paged(problem)) {
    extents.seqlen_k = check_paged(problem, keys, extents.batch);
    return extents;
  }
  if (is_given(keys.cu_seqlens)) {
    require(static_cast<std::int64_t>(keys.cu_seqlens.size()) == extents.batch + 1,
            "cu_seqlens_k has ", keys.cu_seqlens.size(),
            " entries but the number of query sequences is ", extents.batch, "; it must have ",
            extents.batch + 1);
  } else {
    require(problem.k.shape[0] == extents.batch, "k holds ", problem.k.shape[0],
            " sequences (its first extent) but the number of query sequences is ", extents.batch,
            "; they must be equal, unless cu_seqlens_k or block_table is given");
  }
  extents.seqlen_k = check_rows(keys, extents.batch);
  return extents;
}

}  // namespace fovea
