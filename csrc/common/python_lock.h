// Python's lock, where there is a Python: three functions that every version has, found when the library is loaded.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <vector>

extern "C" {
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int state);
}

namespace amp_wrapper {

// Frees lists of tensors at its end. An op runs without Python's lock, and torch takes it anew for each tensor that nobody but
// Python holds from then on; here it is taken once for all of them.
class FreedAtOnce {
 public:
  FreedAtOnce(std::initializer_list<c10::List<at::Tensor>*> lists) : lists_(lists) {}
  FreedAtOnce(const FreedAtOnce&) = delete;
  FreedAtOnce& operator=(const FreedAtOnce&) = delete;
  ~FreedAtOnce() {
    const bool has_python = PyGILState_Ensure != nullptr && Py_IsInitialized();
    const int state = has_python ? PyGILState_Ensure() : 0;
    for (c10::List<at::Tensor>* list : lists_) *list = c10::List<at::Tensor>();
    if (has_python) PyGILState_Release(state);
  }

 private:
  std::vector<c10::List<at::Tensor>*> lists_;
};

}  // namespace amp_wrapper
