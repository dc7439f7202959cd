// Fields of less than a byte, packed in planes: compiled once per instruction set.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace CAPIBARA_ISA {

// Numbers at any address.
struct Loose16 {
  uint16_t v;
} __attribute__((packed, may_alias));
struct Loose32 {
  uint32_t v;
} __attribute__((packed, may_alias));
struct Loose64 {
  uint64_t v;
} __attribute__((packed, may_alias));

static inline uint16_t load16(const void* p) { return static_cast<const Loose16*>(p)->v; }
static inline uint32_t load32(const void* p) { return static_cast<const Loose32*>(p)->v; }
static inline uint64_t load64(const void* p) { return static_cast<const Loose64*>(p)->v; }

static inline uint64_t gather1(uint64_t x) { return (x & 0x0101010101010101u) * 0x0102040810204080u >> 56; }
static inline uint64_t gather2(uint64_t x) {
  x &= 0x0303030303030303u;
  x = (x | x >> 6) & 0x000f000f000f000fu;
  x = (x | x >> 12) & 0x000000ff000000ffu;
  return (x | x >> 24) & 0xffff;
}
static inline uint64_t gather4(uint64_t x) {
  x &= 0x0f0f0f0f0f0f0f0fu;
  x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
  x = (x | x >> 8) & 0x0000ffff0000ffffu;
  return (x | x >> 16) & 0xffffffff;
}
static inline uint64_t spread1(uint64_t b) {
  const uint64_t x = b * 0x0101010101010101u & 0x8040201008040201u;
  return (((x & 0x7f7f7f7f7f7f7f7fu) + 0x7f7f7f7f7f7f7f7fu) | x) >> 7 & 0x0101010101010101u;
}
static inline uint64_t spread2(uint64_t x) {
  x = (x | x << 24) & 0x000000ff000000ffu;
  x = (x | x << 12) & 0x000f000f000f000fu;
  return (x | x << 6) & 0x0303030303030303u;
}
static inline uint64_t spread4(uint64_t x) {
  x = (x | x << 16) & 0x0000ffff0000ffffu;
  x = (x | x << 8) & 0x00ff00ff00ff00ffu;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
}

#if defined(__AVX2__)
// 32 numbers at a time of the `size` bits above `left`; returns how many were done.
static inline int64_t pack_many(const uint8_t* low, int64_t count, int left, int size, uint8_t* p) {
  const __m128i shift = _mm_cvtsi32_si128(left), up = _mm_cvtsi32_si128(7 - left);
  const __m256i mask = _mm256_set1_epi8(char((1 << size) - 1));
  int64_t i = 0;
  for (; i + 32 <= count; i += 32, p += 4 * size) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + i));
    if (size == 1) {
      reinterpret_cast<Loose32*>(p)->v = uint32_t(_mm256_movemask_epi8(_mm256_sll_epi16(x, up)));
      continue;
    }
    // Neighbours are added, the second one multiplied by what puts it above the first.
    const __m256i field = _mm256_and_si256(_mm256_srl_epi16(x, shift), mask);
    __m256i y = _mm256_maddubs_epi16(field, _mm256_set1_epi16(size == 4 ? 1 + (16 << 8) : 1 + (4 << 8)));
    if (size == 2) y = _mm256_madd_epi16(y, _mm256_set1_epi32(1 + (16 << 16)));
    const __m128i a = _mm256_castsi256_si128(y), b = _mm256_extracti128_si256(y, 1);
    if (size == 4)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(a, b));
    else
      _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(_mm_packs_epi32(a, b), a));
  }
  return i;
}
#else
static inline int64_t pack_many(const uint8_t*, int64_t, int, int, uint8_t*) { return 0; }
#endif

// The planes of less than a byte of the lowest `width` bits of `low` [count, and up to 8 more], from `begin` on.
static inline void pack_low(const uint8_t* low, int64_t begin, int64_t count, int width, int64_t total,
                            uint8_t* planes) {
  int left = width;
  for (int size = 4; size; size /= 2) {
    if (left < size) continue;
    left -= size;
    uint8_t* p = planes + begin * size / 8;
    int64_t i = pack_many(low, count, left, size, p);
    p += i * size / 8;
    for (; i + 8 <= count; i += 8, p += size) {
      const uint64_t x = load64(low + i) >> left;
      if (size == 4) reinterpret_cast<Loose32*>(p)->v = uint32_t(gather4(x));
      if (size == 2) reinterpret_cast<Loose16*>(p)->v = uint16_t(gather2(x));
      if (size == 1) *p = uint8_t(gather1(x));
    }
    if (i < count) {
      uint64_t x = 0;
      for (int64_t j = i; j < count; ++j) x |= uint64_t(uint8_t(low[j] >> left)) << (j - i) * 8;
      x = size == 4 ? gather4(x) : size == 2 ? gather2(x) : gather1(x);
      for (int64_t bytes = ((count - i) * size + 7) / 8; bytes-- > 0; x >>= 8) *p++ = uint8_t(x);
    }
    planes += (total * size + 7) / 8;
  }
}

#if defined(__AVX2__)
// 32 numbers at a time of a plane of `size` bits; returns how many were done. `add` keeps what is there.
template <int size, bool add>
static inline int64_t unpack_many(uint8_t* low, int64_t count, int left, const uint8_t* p) {
  const __m128i shift = _mm_cvtsi32_si128(left);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32, p += 4 * size) {
    // What becomes bytes that follow one another is moved apart, by halves of what is left.
    __m256i x;
    if (size == 4) x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    if (size == 2) x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    if (size == 1) x = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int(load32(p))));
    if (size == 1) x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi64(x, 28)), _mm256_set1_epi32(15));
    if (size <= 2)
      x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 16 - 2 * size)),
                           _mm256_set1_epi16((1 << 2 * size) - 1));
    x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi16(x, 8 - size)), _mm256_set1_epi8((1 << size) - 1));
    x = _mm256_sll_epi16(x, shift);  // a field stays within its byte
    __m256i* const to = reinterpret_cast<__m256i*>(low + i);
    _mm256_storeu_si256(to, add ? _mm256_or_si256(x, _mm256_loadu_si256(to)) : x);
  }
  return i;
}
#else
template <int size, bool add>
static inline int64_t unpack_many(uint8_t*, int64_t, int, const uint8_t*) {
  return 0;
}
#endif

static inline void unpack_low(uint8_t* low, int64_t begin, int64_t count, int width, int64_t total,
                              const uint8_t* planes) {
  int left = width;
  bool first = true;
  for (int size = 4; size; size /= 2) {
    if (left < size) continue;
    left -= size;
    const uint8_t* p = planes + begin * size / 8;
    int64_t i = 0;
    if (size == 4) i = unpack_many<4, false>(low, count, left, p);  // it is the first if it is there
    if (size == 2) i = first ? unpack_many<2, false>(low, count, left, p) : unpack_many<2, true>(low, count, left, p);
    if (size == 1) i = first ? unpack_many<1, false>(low, count, left, p) : unpack_many<1, true>(low, count, left, p);
    p += i * size / 8;
#define CAPIBARA_UNPACK(load, spread)                                                              \
  if (first)                                                                                       \
    for (; i + 8 <= count; i += 8, p += size)                                                      \
      reinterpret_cast<Loose64*>(low + i)->v = spread(load) << left;                               \
  else                                                                                             \
    for (; i + 8 <= count; i += 8, p += size) reinterpret_cast<Loose64*>(low + i)->v |= spread(load) << left;
    if (size == 4) {
      CAPIBARA_UNPACK(load32(p), spread4)
    } else if (size == 2) {
      CAPIBARA_UNPACK(load16(p), spread2)
    } else {
      CAPIBARA_UNPACK(*p, spread1)
    }
    if (i < count) {
      uint64_t x = 0;
      for (int64_t b = 0; b < ((count - i) * size + 7) / 8; ++b) x |= uint64_t(p[b]) << b * 8;
      x = size == 4 ? spread4(x) : size == 2 ? spread2(x) : spread1(x);
      for (int64_t j = i; j < count; ++j, x >>= 8) low[j] = uint8_t((first ? 0 : low[j]) | uint8_t(x) << left);
    }
    first = false;
    planes += (total * size + 7) / 8;
  }
}

}  // namespace CAPIBARA_ISA
