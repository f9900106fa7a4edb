// Libraries of the CUDA Toolkit that are opened when they are first used.
#pragma once
#include <dlfcn.h>

#include <string>
#include <vector>

#include "core/base/error.hpp"

namespace ballast::cuda {

class SharedLibrary {
 public:
  /// Opens the first of `files` that is found.  Errors: none is, by the name of the first.
  explicit SharedLibrary(const std::vector<std::string>& files) : name_(files.front()) {
    for (const std::string& file : files)
      if (library_ == nullptr) library_ = dlopen(file.c_str(), RTLD_NOW);
    require(library_ != nullptr,
            "{} was not found; it comes with the CUDA Toolkit, put its folder on LD_LIBRARY_PATH",
            name_);
  }
  /// Errors: the library has no such function.
  template <class Function>
  void load(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(dlsym(library_, symbol));
    require(function != nullptr, "{} has no {}", name_, symbol);
  }

 private:
  std::string name_;
  void* library_ = nullptr;
};

}  // namespace ballast::cuda
