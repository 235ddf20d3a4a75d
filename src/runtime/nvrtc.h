// NVRTC, CUDA's run-time compiler, opened by name when it is needed: nothing links against it.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace fovea::runtime {

enum class ImageFormat { cubin, ptx };

struct SourceFile {
  std::string name;  // as an #include says it
  std::string text;
};

class Nvrtc {
 public:
  // The library that would be opened, without opening it (it is 100 MB). Looks, in this order, at
  // FOVEA_NVRTC (a file or its folder; nothing else is looked at when it is set), CUDA_HOME,
  // CUDA_PATH, LD_LIBRARY_PATH, /usr/local/cuda, the active virtual environment, the folders above
  // this library (the PyPI wheel nvidia-cuda-nvrtc lies beside the Python package), and the
  // system's library cache. Throws Unsupported, saying how to get NVRTC, when there is none.
  static std::filesystem::path find();

  // Names the library's build: file name, size and time of last change.
  static std::string identity(const std::filesystem::path& library);

  // Throws Unsupported when the file cannot be opened as NVRTC 12.8 or later.
  explicit Nvrtc(const std::filesystem::path& library);

  struct Result {
    bool ok = false;
    std::string image;  // cubin or PTX text
    std::string log;    // the compiler's, and ptxas's report
  };
  // Options are NVRTC's own. Safe for several threads.
  Result compile(const std::string& text, const std::vector<SourceFile>& headers,
                 const std::vector<std::string>& options, ImageFormat format) const;

  int major() const { return major_; }
  int minor() const { return minor_; }

 private:
  struct Functions;
  std::shared_ptr<const Functions> functions_;
  int major_ = 0;
  int minor_ = 0;
};

}  // namespace fovea::runtime
