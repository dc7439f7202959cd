// Checksums. Compiled once per instruction set.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace CAPIBARA_ISA {

#if defined(__AVX2__)
// By products without carries: V. Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009.
// Constants are powers of x modulo the polynomial, bits in reverse, for steps of so many bytes.
#define CAPIBARA_FOLD(a, k) _mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11))

// What the remainder of all bytes is, once they are folded into sixteen.
__attribute__((target("pclmul"))) static uint32_t crc32_of_folded(__m128i y) {
  const __m128i near = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i half = _mm_set_epi32(0, -1, 0, -1), polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  y = _mm_xor_si128(_mm_srli_si128(y, 8), _mm_clmulepi64_si128(y, near, 0x10));
  y = _mm_xor_si128(_mm_srli_si128(y, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(y, half), _mm_set_epi64x(0, 0x0163cd6124), 0x00));
  __m128i z = _mm_clmulepi64_si128(_mm_and_si128(y, half), polynomial, 0x10);
  z = _mm_clmulepi64_si128(_mm_and_si128(z, half), polynomial, 0x00);
  return uint32_t(_mm_extract_epi32(_mm_xor_si128(y, z), 1));
}

__attribute__((target("pclmul"))) static __m128i fold_rest(__m128i y, const uint8_t* data, int64_t size) {
  const __m128i near = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  for (; size >= 16; data += 16, size -= 16)
    y = _mm_xor_si128(CAPIBARA_FOLD(y, near), _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
  return y;
}

__attribute__((target("pclmul"))) static uint32_t crc32_by_16(uint32_t crc, const uint8_t* data, int64_t size) {
  const auto next = [&] {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
    data += 16;
    size -= 16;
    return x;
  };
  const __m128i far = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), near = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i x[4] = {next(), next(), next(), next()};
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(int(crc)));
  while (size >= 64)
    for (int i = 0; i < 4; ++i) x[i] = _mm_xor_si128(CAPIBARA_FOLD(x[i], far), next());
  __m128i y = x[0];
  for (int i = 1; i < 4; ++i) y = _mm_xor_si128(CAPIBARA_FOLD(y, near), x[i]);
  return crc32_of_folded(fold_rest(y, data, size));
}

// Twice as many bytes in an instruction.
__attribute__((target("pclmul,vpclmulqdq"))) static uint32_t crc32_by_32(uint32_t crc, const uint8_t* data,
                                                                         int64_t size) {
  const auto next = [&] {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    data += 32;
    size -= 32;
    return x;
  };
  const __m256i far = _mm256_set_epi64x(0x014a7fe880, 0x01e88ef372, 0x014a7fe880, 0x01e88ef372);
  const __m256i middle = _mm256_set_epi64x(0x015a546366, 0x00f1da05aa, 0x015a546366, 0x00f1da05aa);
  const __m128i near = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
#define CAPIBARA_FOLD_TWO(a, k) \
  _mm256_xor_si256(_mm256_clmulepi64_epi128(a, k, 0x00), _mm256_clmulepi64_epi128(a, k, 0x11))
  __m256i x[4] = {next(), next(), next(), next()};
  x[0] = _mm256_xor_si256(x[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(int(crc))));
  while (size >= 128)
    for (int i = 0; i < 4; ++i) x[i] = _mm256_xor_si256(CAPIBARA_FOLD_TWO(x[i], far), next());
  __m256i z = x[0];
  for (int i = 1; i < 4; ++i) z = _mm256_xor_si256(CAPIBARA_FOLD_TWO(z, middle), x[i]);
#undef CAPIBARA_FOLD_TWO
  const __m128i y =
      _mm_xor_si128(CAPIBARA_FOLD(_mm256_castsi256_si128(z), near), _mm256_extracti128_si256(z, 1));
  return crc32_of_folded(fold_rest(y, data, size));
}
#undef CAPIBARA_FOLD

static uint32_t crc32(uint32_t crc, const uint8_t* data, int64_t size) {
  static const bool wide = (__builtin_cpu_init(), __builtin_cpu_supports("vpclmulqdq"));
  return wide && size >= 128 ? crc32_by_32(crc, data, size) : crc32_by_16(crc, data, size);
}
#else
constexpr uint32_t (*crc32)(uint32_t, const uint8_t*, int64_t) = nullptr;
#endif

}  // namespace CAPIBARA_ISA
