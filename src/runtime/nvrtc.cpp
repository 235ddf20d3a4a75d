#include "runtime/nvrtc.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <string_view>

#include "fovea/fovea.hpp"

namespace fovea::runtime {

namespace {

namespace fs = std::filesystem;

// The file names NVRTC has: 13 first, since that is what the kernels are tested with.
constexpr std::string_view library_names[] = {"libnvrtc.so.13", "libnvrtc.so.14", "libnvrtc.so",
                                              "libnvrtc.so.12"};

constexpr std::string_view how_to_get =
    "run scripts/setup --cuda (or: pip install nvidia-cuda-nvrtc), or set FOVEA_NVRTC to "
    "libnvrtc.so";

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

fs::path library_in(const fs::path& folder) {
  std::error_code ignored;
  for (const std::string_view name : library_names) {
    fs::path file = folder / name;
    if (fs::is_regular_file(file, ignored)) return file;
  }
  return {};
}

// The folders that wheels of a site-packages directory put NVRTC in.
fs::path library_in_site_packages(const fs::path& site_packages) {
  for (const char* folder : {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}) {
    if (fs::path file = library_in(site_packages / folder); !file.empty()) return file;
  }
  return {};
}

fs::path library_in_environment(const fs::path& virtual_environment) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(virtual_environment / "lib", error)) {
    if (fs::path file = library_in_site_packages(entry.path() / "site-packages"); !file.empty()) {
      return file;
    }
  }
  return {};
}

// This library may be installed as site-packages/fovea/..., with NVRTC's wheel next to it.
fs::path library_beside_this_one() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&library_beside_this_one), &info) == 0) return {};
  std::error_code error;
  fs::path folder = fs::absolute(info.dli_fname, error);
  for (int level = 0; level < 4 && folder.has_parent_path(); ++level) {
    folder = folder.parent_path();
    if (fs::path file = library_in_site_packages(folder); !file.empty()) return file;
  }
  return {};
}

fs::path library_in_system_cache() {
  for (const std::string_view name : library_names) {
    void* handle = dlopen(std::string(name).c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) continue;
    link_map* map = nullptr;
    fs::path file;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) file = map->l_name;
    dlclose(handle);
    if (!file.empty()) return file;
  }
  return {};
}

fs::path library_in_path_list(std::string_view list) {
  while (!list.empty()) {
    const std::size_t colon = list.find(':');
    const std::string_view folder = list.substr(0, colon);
    if (!folder.empty()) {
      if (fs::path file = library_in(folder); !file.empty()) return file;
    }
    list = colon == std::string_view::npos ? "" : list.substr(colon + 1);
  }
  return {};
}

}  // namespace

fs::path Nvrtc::find() {
  std::error_code ignored;
  if (const std::string named = environment("FOVEA_NVRTC"); !named.empty()) {
    if (fs::is_regular_file(named, ignored)) return named;
    if (fs::path file = library_in(named); !file.empty()) return file;
    throw Unsupported("FOVEA_NVRTC is '" + named +
                      "', but must name libnvrtc.so or the folder that holds it");
  }
  for (const std::string& home :
       {environment("CUDA_HOME"), environment("CUDA_PATH"), std::string("/usr/local/cuda")}) {
    for (const char* folder : {"lib64", "lib"}) {
      if (home.empty()) continue;
      if (fs::path file = library_in(fs::path(home) / folder); !file.empty()) return file;
    }
  }
  if (fs::path file = library_in_path_list(environment("LD_LIBRARY_PATH")); !file.empty()) {
    return file;
  }
  if (const std::string venv = environment("VIRTUAL_ENV"); !venv.empty()) {
    if (fs::path file = library_in_environment(venv); !file.empty()) return file;
  }
  if (fs::path file = library_beside_this_one(); !file.empty()) return file;
  if (fs::path file = library_in_system_cache(); !file.empty()) return file;
  throw Unsupported("GPU kernels are compiled by NVRTC, and no libnvrtc.so.13 was found: " +
                    std::string(how_to_get));
}

std::string Nvrtc::identity(const fs::path& library) {
  std::error_code ignored;
  const fs::path file = fs::canonical(library, ignored);
  const auto time = fs::last_write_time(file, ignored).time_since_epoch().count();
  return file.filename().string() + " " + std::to_string(fs::file_size(file, ignored)) + " " +
         std::to_string(time);
}

// The part of nvrtc.h that is used, as function pointers. nvrtcResult is an int, 0 for success;
// nvrtcProgram an opaque pointer.
struct Nvrtc::Functions {
  using Program = void*;
  int (*version)(int*, int*);
  const char* (*error_string)(int);
  int (*create)(Program*, const char* text, const char* name, int count, const char* const* headers,
                const char* const* names);
  int (*compile)(Program, int count, const char* const* options);
  int (*destroy)(Program*);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*ptx_size)(Program, std::size_t*);
  int (*ptx)(Program, char*);
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);
};

Nvrtc::Nvrtc(const fs::path& library) {
  // Never closed: NVRTC keeps threads and static state of its own.
  void* handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Unsupported("NVRTC does not open (" + std::string(dlerror()) +
                      "): " + std::string(how_to_get));
  }
  const auto functions = std::make_shared<Functions>();
  const auto load = [&](auto& function, const char* name) {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr) {
      throw Unsupported(library.string() + " lacks " + name +
                        " and is no NVRTC: " + std::string(how_to_get));
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  load(functions->version, "nvrtcVersion");
  load(functions->error_string, "nvrtcGetErrorString");
  load(functions->create, "nvrtcCreateProgram");
  load(functions->compile, "nvrtcCompileProgram");
  load(functions->destroy, "nvrtcDestroyProgram");
  load(functions->log_size, "nvrtcGetProgramLogSize");
  load(functions->log, "nvrtcGetProgramLog");
  load(functions->ptx_size, "nvrtcGetPTXSize");
  load(functions->ptx, "nvrtcGetPTX");
  load(functions->cubin_size, "nvrtcGetCUBINSize");
  load(functions->cubin, "nvrtcGetCUBIN");
  functions->version(&major_, &minor_);
  if (major_ < 12 || (major_ == 12 && minor_ < 8)) {
    throw Unsupported("NVRTC here is " + std::to_string(major_) + "." + std::to_string(minor_) +
                      ", but must be 12.8 or later: " + std::string(how_to_get));
  }
  functions_ = functions;
}

Nvrtc::Result Nvrtc::compile(const std::string& text, const std::vector<SourceFile>& headers,
                             const std::vector<std::string>& options, ImageFormat format) const {
  std::vector<const char*> header_texts;
  std::vector<const char*> header_names;
  for (const SourceFile& header : headers) {
    header_texts.push_back(header.text.c_str());
    header_names.push_back(header.name.c_str());
  }
  std::vector<const char*> option_texts;
  for (const std::string& option : options) option_texts.push_back(option.c_str());
  // A result from NVRTC's own cache comes without ptxas's report. Release 12 knows no such option.
  if (major_ >= 13) option_texts.push_back("--no-cache");

  const Functions& f = *functions_;
  Result result;
  Functions::Program program = nullptr;
  int status = f.create(&program, text.c_str(), "kernel.cu", static_cast<int>(headers.size()),
                        header_texts.data(), header_names.data());
  if (status != 0) {
    result.log = f.error_string(status);
    return result;
  }
  status = f.compile(program, static_cast<int>(option_texts.size()), option_texts.data());
  // Both texts come with a terminating zero, which is counted.
  std::size_t size = 0;
  if (f.log_size(program, &size) == 0 && size > 1) {
    result.log.resize(size);
    f.log(program, result.log.data());
    while (!result.log.empty() && result.log.back() == '\0') result.log.pop_back();
  }
  if (status == 0 && format == ImageFormat::ptx) {
    f.ptx_size(program, &size);
    result.image.resize(size);
    status = f.ptx(program, result.image.data());
    while (!result.image.empty() && result.image.back() == '\0') result.image.pop_back();
  } else if (status == 0) {
    f.cubin_size(program, &size);
    result.image.resize(size);
    status = f.cubin(program, result.image.data());
  }
  if (status != 0) result.log += f.error_string(status);
  f.destroy(&program);
  result.ok = status == 0 && !result.image.empty();
  return result;
}

}  // namespace fovea::runtime
