// Large results: fresh memory in large pages.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace capibara {

// Asks the system for large pages under memory that is about to be written as a whole. XLA's results are fresh memory:
// in small pages, a result as large as the matrices of many experts takes a fifth of the time that computing it does.
inline void prefer_large_pages(void* data, size_t bytes) {
  constexpr uintptr_t kLarge = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kLarge - 1) / kLarge * kLarge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kLarge * kLarge;
  // Where the system declines, pages stay small.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace capibara
