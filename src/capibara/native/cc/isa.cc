// Chooses among the instruction sets that the library was compiled for; CAPIBARA_NATIVE_ISA narrows the choice.
#include "isa.h"

#include <cstdlib>
#include <cstring>

#define CAPIBARA_DECLARE(set)                          \
  namespace set {                                      \
  extern const capibara::AttentionKernels kAttention;  \
  extern const capibara::TropicalKernels kTropical;    \
  extern const capibara::CodecKernels kCodec;          \
  extern const capibara::ScanKernels kScan;            \
  extern const capibara::QuantisedKernels kQuantised;  \
  extern const capibara::FixedKernels kFixed;          \
  extern const capibara::GroupedKernels kGrouped;      \
  extern const capibara::ThinKernels kThin;            \
  extern const capibara::PagedKernels kPaged;          \
  extern const capibara::ElementwiseKernels kElementwise; \
  }

#if defined(__aarch64__)
CAPIBARA_DECLARE(neon)
#else
CAPIBARA_DECLARE(baseline)
#endif
#if defined(__x86_64__)
CAPIBARA_DECLARE(avx2)
CAPIBARA_DECLARE(avx512)
#endif

namespace capibara {
namespace {

Isa choose() {
  const char* wish = std::getenv("CAPIBARA_NATIVE_ISA");
  const auto wanted = [wish](const char* name) { return wish == nullptr || std::strcmp(wish, name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (wanted("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return {&avx512::kAttention, &avx512::kTropical, &avx512::kCodec, &avx512::kScan, &avx512::kQuantised,
            &avx512::kFixed, &avx512::kGrouped, &avx512::kThin, &avx512::kPaged,  &avx512::kElementwise};
  if (wanted("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {&avx2::kAttention, &avx2::kTropical, &avx2::kCodec,  &avx2::kScan, &avx2::kQuantised,
            &avx2::kFixed,     &avx2::kGrouped,   &avx2::kThin, &avx2::kPaged,  &avx2::kElementwise};
#endif
  (void)wanted;
#if defined(__aarch64__)
  return {&neon::kAttention, &neon::kTropical, &neon::kCodec,  &neon::kScan, &neon::kQuantised,
          &neon::kFixed,     &neon::kGrouped,   &neon::kThin, &neon::kPaged,  &neon::kElementwise};
#else
  return {&baseline::kAttention, &baseline::kTropical, &baseline::kCodec, &baseline::kScan, &baseline::kQuantised,
          &baseline::kFixed, &baseline::kGrouped, &baseline::kThin, &baseline::kPaged,  &baseline::kElementwise};
#endif
}

}  // namespace

const Isa& isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace capibara

extern "C" __attribute__((visibility("default"))) const char* capibara_native_isa() {
  return capibara::isa().attention->name;
}

#ifndef CAPIBARA_SOURCES
#error "CAPIBARA_SOURCES is the digest of these sources"
#endif
extern "C" __attribute__((visibility("default"))) const char* capibara_native_sources() { return CAPIBARA_SOURCES; }
