// The lists of an update, in order. Kernels know them by these numbers; the states and the partners may be missing.
#pragma once

namespace amp_wrapper {

enum AdamList { kAdamGradient, kAdamParameter, kAdamFirst, kAdamSecond, kAdamMost, kAdamPartner, kAdamLists };
enum SgdList { kSgdGradient, kSgdParameter, kSgdBuffer, kSgdPartner, kSgdLists };

}  // namespace amp_wrapper
