// How much of a matrix is brought nearer while a thread waits for others.
#pragma once

#include <stdint.h>

namespace CAPIBARA_ISA {

// Parts of so many bytes, and as many as leave room in a core's own cache.
constexpr int64_t kPart = 4096, kMostParts = 64;

}  // namespace CAPIBARA_ISA
