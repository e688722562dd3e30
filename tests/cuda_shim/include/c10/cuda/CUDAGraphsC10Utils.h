#pragma once

namespace shim {
// Whether a graph is being recorded.
inline bool captures = false;
}  // namespace shim

namespace c10::cuda {

enum class CaptureStatus : int { None, Active };

inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return shim::captures ? CaptureStatus::Active : CaptureStatus::None;
}

}  // namespace c10::cuda
