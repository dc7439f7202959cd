// Stores that go past the caches, where the processor has them.
#pragma once

#include "vec.h"

namespace CAPIBARA_ISA {

// Whether vectors can be streamed to this address: it begins a line of the cache.
static inline bool streams(const float* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

static inline void stream(float* p, Vec x) {
#if defined(__clang__)
  __builtin_nontemporal_store(x, reinterpret_cast<Vec*>(p));
#elif defined(__AVX512F__)
  __builtin_ia32_movntps512(p, x);
#elif defined(__AVX2__)
  __builtin_ia32_movntps256(p, x);
#elif defined(__SSE__)
  __builtin_ia32_movntps(p, x);
#else
  store(p, x);
#endif
}

// Orders them before what this thread writes after them.
static inline void end_streams() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace CAPIBARA_ISA
