// Problems out of files: names to tensors, and tensors to a workload.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/array.h"
#include "tools/file.h"
#include "tools/problem_options.h"
#include "tools/workload.h"

namespace fovea::tools {

// Named arrays and the files that hold their bytes.
class TensorFiles {
 public:
  // Adds arrays whose bytes outlive this object.
  void add(const std::map<std::string, Array>& arrays);
  // Adds every tensor of a .safetensors file. Throws Error, whose message names the file.
  void add_safetensors(const std::string& path);
  // Adds a .npy file under a name.
  void add_npy(const std::string& name, const std::string& path);

  [[nodiscard]] const Array* find(const std::string& name) const;
  // Throws Error when there is none.
  [[nodiscard]] const Array& get(const std::string& name) const;

 private:
  std::string origin_;  // last file added, for messages
  std::vector<std::unique_ptr<FileBytes>> files_;
  std::map<std::string, Array> arrays_;
};

// Builds the problem of `files`: q, k and v of rank 4, or of rank 3 without a batch (packed when
// cu_seqlens_q and cu_seqlens_k are there), and whatever else Problem has a field for: seqused_q,
// seqused_k, block_table, bias, mask, sink, alibi. The result's out has `out_dtype`; its lse is
// present if asked. `files` must outlive the workload, which points into them. Throws Error.
[[nodiscard]] Workload load_workload(const TensorFiles& files, const ProblemOptions& options,
                                     DType out_dtype, bool with_lse);

// Shapes in which results are written: those of q, whose rank they keep.
[[nodiscard]] std::vector<std::int64_t> out_shape(const TensorFiles& files,
                                                  const Workload& workload);
[[nodiscard]] std::vector<std::int64_t> lse_shape(const TensorFiles& files,
                                                  const Workload& workload);

// An array of floating-point numbers, in fp64. Throws Error, which names it `what`.
[[nodiscard]] std::vector<double> to_doubles(std::string_view what, const Array& array);

}  // namespace fovea::tools
