// The codec's loops, compiled once per instruction set.
#include "codec.h"

#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace CAPIBARA_ISA {

using capibara::Cut;
using capibara::kBlock;
using capibara::kLanes;
using capibara::kLowest;
using capibara::kScaleBits;
using capibara::kStrip;

constexpr uint32_t kMask = (1u << kScaleBits) - 1;

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

// ---- fields of less than a byte: eight of them in one number ------------------------------------------------------

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

#if defined(__SSE2__)
// 32 numbers at a time of a plane of `size` bits; returns how many were done. `add` keeps what is there.
template <int size, bool add>
static inline int64_t unpack_many(uint8_t* low, int64_t count, int left, const uint8_t* p) {
  const __m128i mask = _mm_set1_epi8((1 << size) - 1), shift = _mm_cvtsi32_si128(left);
  int64_t i = 0;
  const auto put = [&](int64_t at, __m128i x) {
    __m128i* to = reinterpret_cast<__m128i*>(low + at);
    x = _mm_sll_epi16(x, shift);  // a field stays within its byte
    _mm_storeu_si128(to, add ? _mm_or_si128(x, _mm_loadu_si128(to)) : x);
  };
  for (; i + 128 / size <= count; i += 128 / size, p += 16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i halves[2] = {size == 4 ? x : _mm_and_si128(x, _mm_set1_epi8(15)),
                               _mm_and_si128(_mm_srli_epi16(x, 4), _mm_set1_epi8(15))};
    const __m128i four[2] = {_mm_unpacklo_epi8(halves[0], halves[1]), _mm_unpackhi_epi8(halves[0], halves[1])};
    for (int h = 0; h < 2; ++h) {
      if (size == 4) {
        put(i + 16 * h, _mm_and_si128(four[h], mask));
        continue;
      }
      // Each byte holds four bits: pairs of fields, and for single bits those pairs cut again.
      const __m128i a = _mm_and_si128(four[h], _mm_set1_epi8(3));
      const __m128i b = _mm_and_si128(_mm_srli_epi16(four[h], 2), _mm_set1_epi8(3));
      const __m128i two[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
      for (int q = 0; q < 2; ++q) {
        if (size == 2) {
          put(i + 32 * h + 16 * q, two[q]);
          continue;
        }
        const __m128i c = _mm_and_si128(two[q], mask), d = _mm_and_si128(_mm_srli_epi16(two[q], 1), mask);
        put(i + 64 * h + 32 * q, _mm_unpacklo_epi8(c, d));
        put(i + 64 * h + 32 * q + 16, _mm_unpackhi_epi8(c, d));
      }
    }
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

// ---- the coder ---------------------------------------------------------------------------------------------------

#if defined(__AVX2__)
// For each of the 256 sets of lanes: which bytes of the next words go where (128: none, a zero), and in what order lanes
// leave theirs.
struct Spread {
  alignas(32) uint8_t to[256][32];
  alignas(32) uint32_t from[256][8];
  Spread() {
    memset(to, 128, sizeof to);
    for (int m = 0; m < 256; ++m) {
      const int count = __builtin_popcount(unsigned(m));
      for (int l = 0, n = 0; l < 8; ++l) {
        from[m][l] = 0;
        if ((m >> l & 1) == 0) continue;
        to[m][4 * l] = uint8_t(n++);
        to[m][4 * l + 1] = uint8_t(n++);
      }
      for (int l = 0, n = 8 - count; l < 8; ++l)
        if (m >> l & 1) from[m][n++] = uint32_t(l);
    }
  }
};
static const Spread& spread() {
  static const Spread made;
  return made;
}

// Eight entries of a table. Where there is no AVX-512, processors take more time for a gather than for eight loads.
static inline __m256i look_up(const uint32_t* table, __m256i at) {
#if defined(__AVX512VL__)
  return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), at, 4);
#else
  const auto two = [table](uint64_t i) {
    return _mm_insert_epi32(_mm_cvtsi32_si128(int(table[uint32_t(i)])), int(table[i >> 32]), 1);
  };
  const auto four = [&](__m128i i) {
    return _mm_unpacklo_epi64(two(uint64_t(_mm_cvtsi128_si64(i))), two(uint64_t(_mm_extract_epi64(i, 1))));
  };
  const __m128i low = four(_mm256_castsi256_si128(at)), high = four(_mm256_extracti128_si256(at, 1));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
#endif
}
#endif

#if defined(__AVX2__)
// Eight lanes at a time. A quotient is found in float32, which may be one too large or too small, and put right: a state
// is below 2^20 frequencies, and three roundings and the half that is lost are below one together. A symbol of frequency
// 1 loses one, but its product is exact.
static uint16_t* encode_steps(const uint8_t* symbols, int64_t steps, const capibara::Part* parts, uint32_t* states,
                              uint16_t* out) {
  uint32_t table[256];  // frequency - 1, and above its twelve bits the start
  for (int i = 0; i < 256; ++i) table[i] = ((kMask - parts[i].bias) & kMask) | parts[i].start << kScaleBits;
  const auto two = [&table](const uint8_t* s) {
    return _mm_insert_epi32(_mm_cvtsi32_si128(int(table[s[0]])), int(table[s[1]]), 1);
  };
  const auto& order = spread().from;
  const __m256i mask = _mm256_set1_epi32(int(kMask)), one = _mm256_set1_epi32(1);
  const __m256i low = _mm256_set1_epi32(0xffff), sixteen = _mm256_set1_epi32(16);
  const __m256i scale = _mm256_set1_epi32(1 << kScaleBits);
  __m256i v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + 8 * i));
  for (const uint8_t* at = symbols + (steps - 1) * kLanes; at >= symbols; at -= kLanes)
    for (int i = 3; i >= 0; --i) {
      const uint8_t* s = at + 8 * i;
      const __m128i first = _mm_unpacklo_epi64(two(s), two(s + 2)), second = _mm_unpacklo_epi64(two(s + 4), two(s + 6));
      const __m256i entry = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
      const __m256i most = _mm256_and_si256(entry, mask);  // frequency - 1
      const __m256i frequency = _mm256_add_epi32(most, one);
      __m256i x = v[i];
      const __m256i full = _mm256_cmpgt_epi32(_mm256_srli_epi32(x, 20), most);
      const int m = _mm256_movemask_ps(_mm256_castsi256_ps(full));
      const __m256i words = _mm256_permutevar8x32_epi32(
          _mm256_and_si256(x, low), _mm256_load_si256(reinterpret_cast<const __m256i*>(order[m])));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out - 8),
                       _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
      out -= __builtin_popcount(unsigned(m));
      x = _mm256_srlv_epi32(x, _mm256_and_si256(full, sixteen));
      // Half a state fits a signed number. The division does not wait for the state.
      const __m256 twice = _mm256_div_ps(_mm256_set1_ps(2), _mm256_cvtepi32_ps(frequency));
      const __m256i guess = _mm256_cvttps_epi32(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(x, 1)), twice));
      const __m256i left = _mm256_sub_epi32(x, _mm256_mullo_epi32(guess, frequency));
      const __m256i under = _mm256_srai_epi32(left, 31), over = _mm256_cmpgt_epi32(left, most);
      // One more in the quotient is 4096 more, and a frequency less in what is left.
      const __m256i bias = _mm256_sub_epi32(scale, frequency);
      const __m256i put = _mm256_sub_epi32(_mm256_and_si256(over, bias), _mm256_and_si256(under, bias));
      const __m256i start = _mm256_srli_epi32(entry, kScaleBits);
      const __m256i plain = _mm256_add_epi32(_mm256_slli_epi32(guess, kScaleBits), start);
      v[i] = _mm256_add_epi32(_mm256_add_epi32(plain, left), put);
    }
  for (int i = 0; i < 4; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + 8 * i), v[i]);
  return out;
}
#endif

static int64_t encode(const uint8_t* symbols, int64_t count, const capibara::Part* parts, uint32_t* states,
                      uint16_t* words_end) {
  uint32_t x[kLanes];
  for (int l = 0; l < kLanes; ++l) x[l] = kLowest;
  uint16_t* out = words_end;
  for (int64_t step = (count + kLanes - 1) / kLanes - 1; step >= 0; --step) {
#if defined(__AVX2__)
    if (count - step * kLanes >= kLanes) {  // the last step, which comes first, may have less
      out = encode_steps(symbols, step + 1, parts, x, out);
      break;
    }
#endif
    const uint8_t* s = symbols + step * kLanes;
    const auto one = [&](int l) {
      const capibara::Part& part = parts[s[l]];
      uint32_t v = x[l];
      const bool full = v > part.last;
      out[-1] = uint16_t(v);
      out -= full;
      v = full ? v >> 16 : v;
      x[l] = v + part.start + uint32_t(v * part.reciprocal >> 44) * part.bias;
    };
    if (count - step * kLanes >= kLanes)
#pragma GCC unroll 8
      for (int l = kLanes - 1; l >= 0; --l) one(l);
    else
      for (int l = int(count - step * kLanes) - 1; l >= 0; --l) one(l);
  }
  for (int l = 0; l < kLanes; ++l) states[l] = x[l];
  return words_end - out;
}

// The lanes of a block that is being decoded.
struct Lanes {
  alignas(64) uint32_t x[kLanes];
  const uint8_t *at = nullptr, *end = nullptr;

  void open(const capibara::Block& block) {
    for (int l = 0; l < kLanes; ++l) x[l] = load32(block.states + 4 * l);
    at = block.words;
    end = at + 2 * block.count;
  }

  bool even() const {
    for (int l = 0; l < kLanes; ++l)
      if (x[l] != kLowest) return false;
    return at == end;
  }

  bool some(const uint32_t* table, uint8_t* out, int live) {
    for (int l = 0; l < live; ++l) {
      const uint32_t e = table[x[l] & kMask];
      out[l] = uint8_t(e >> 24);
      x[l] = (e >> kScaleBits & kMask) * (x[l] >> kScaleBits) + (e & kMask);
      if (x[l] < kLowest) {
        if (at == end) return false;
        x[l] = x[l] << 16 | load16(at);
        at += 2;
      }
    }
    return true;
  }

  // The next symbols: a multiple of the lanes, but for a block's last ones. False when the words end.
  // Within another function there would be too few registers for it.
  __attribute__((noinline)) bool decode(const uint32_t* table, uint8_t* symbols, int64_t count) {
    int64_t step = 0;
    if ((table[0] >> kScaleBits & kMask) == 0) {  // all places are one symbol's, which takes no bits
      memset(symbols, int(table[0] >> 24), size_t(count));
      return true;
    }
#if defined(__AVX2__)
    const int64_t full = count / kLanes;
#if !defined(__AVX512VL__)
    const auto& to = spread().to;
    const __m256i zero = _mm256_setzero_si256(), sixteen = _mm256_set1_epi32(16);
#endif
    __m256i v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(x + 8 * i));
    const __m256i mask = _mm256_set1_epi32(int(kMask));
    const uint8_t* from = at;
    for (; step < full && end - from >= 64; ++step) {
      __m256i e[4];
      for (int i = 0; i < 4; ++i) e[i] = look_up(table, _mm256_and_si256(v[i], mask));
      // Packing goes by halves of a register; the permutation puts the quarters in order again.
      const __m256i low = _mm256_packus_epi32(_mm256_srli_epi32(e[0], 24), _mm256_srli_epi32(e[1], 24));
      const __m256i high = _mm256_packus_epi32(_mm256_srli_epi32(e[2], 24), _mm256_srli_epi32(e[3], 24));
      const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high),
                                                      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols + step * kLanes), all);
      for (int i = 0; i < 4; ++i) {
        const __m256i f = _mm256_and_si256(_mm256_srli_epi32(e[i], kScaleBits), mask);
        const __m256i y = _mm256_add_epi32(_mm256_mullo_epi32(f, _mm256_srli_epi32(v[i], kScaleBits)),
                                           _mm256_and_si256(e[i], mask));
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
#if defined(__AVX512VL__)
        const __m256i next = _mm256_cvtepu16_epi32(words);
        const __mmask8 m = _mm256_cmplt_epu32_mask(y, _mm256_set1_epi32(int(kLowest)));
        v[i] = _mm256_mask_or_epi32(y, m, _mm256_slli_epi32(y, 16), _mm256_maskz_expand_epi32(m, next));
#else
        const __m256i want = _mm256_cmpeq_epi32(_mm256_srli_epi32(y, 16), zero);
        const int m = _mm256_movemask_ps(_mm256_castsi256_ps(want));
        // Each half of the register has all the words, so that no byte has to cross over: that would take longer.
        const __m256i w = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(words),
                                              _mm256_load_si256(reinterpret_cast<const __m256i*>(to[m])));
        v[i] = _mm256_or_si256(_mm256_sllv_epi32(y, _mm256_and_si256(want, sixteen)), w);
#endif
        from += 2 * __builtin_popcount(unsigned(m));
      }
    }
    at = from;
    for (int i = 0; i < 4; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(x + 8 * i), v[i]);
#endif
    for (; step * kLanes < count; ++step) {
      const int live = int(count - step * kLanes < kLanes ? count - step * kLanes : kLanes);
      if (!some(table, symbols + step * kLanes, live)) return false;
    }
    return true;
  }
};

// ---- numbers cut in two ------------------------------------------------------------------------------------------

template <typename T>
struct Numbers {
  // Shifts what is narrower than an int by a width that is known at run time. A product of sixteen bits is one
  // instruction, while for a shift compilers widen the numbers first.
  struct Left {
    int by;
    T factor;
    explicit Left(int width) : by(width), factor(T(T(1) << width)) {}
    T operator()(T v) const { return sizeof(T) == 2 ? T(v * factor) : T(v << by); }
  };

  // Asks for a row that comes soon: rows of a group lie apart, so that the processor does not see them coming.
  static void fetch(const T* row, int64_t length) {
    const int64_t bytes = (length < kStrip ? length : kStrip) * int64_t(sizeof(T));
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + i);
  }

  static void measure(const Cut& cut, int64_t count, int coarse, int64_t* sums, uint64_t* ors) {
    const T* x = static_cast<const T*>(cut.rows);
    const T mask = T((T(1) << cut.symbol_bits) - 1);
    for (int64_t r = 0; r < count; ++r, x += cut.length) {
      uint64_t total = 0;
      T all = 0;
      for (int64_t at = 0; at < cut.length; at += 32768) {
        // A short run fits 32 bits, whatever the symbols: narrower sums are quicker ones.
        const int64_t end = at + 32768 < cut.length ? at + 32768 : cut.length;
        uint32_t part = 0;
        for (int64_t i = at; i < end; ++i) {
          part += uint32_t((T(x[i] >> cut.shift) & mask) >> coarse);
          all |= x[i];
        }
        total += part;
      }
      sums[r] = int64_t(total);
      ors[r] = all;
    }
  }

  static void histogram(const Cut& cut, const int64_t* chosen, int64_t count, uint32_t* scratch, int64_t* counts) {
    const int64_t size = int64_t(1) << cut.symbol_bits, length = cut.length;
    const T* rows = static_cast<const T*>(cut.rows);
    int64_t since = 0;
    const auto flush = [&] {
      for (int64_t i = 0; i < size; ++i) {
        counts[i] += int64_t(scratch[i]) + scratch[size + i] + scratch[2 * size + i] + scratch[3 * size + i];
        scratch[i] = scratch[size + i] = scratch[2 * size + i] = scratch[3 * size + i] = 0;
      }
      since = 0;
    };
    for (int64_t r = 0; r < count; ++r) {
      const T* x = rows + chosen[r] * length;
      if (r + 1 < count) fetch(rows + chosen[r + 1] * length, length);
      for (int64_t at = 0; at < length;) {
        const int64_t room = (int64_t(1) << 30) - since, left = length - at;
        const int64_t some = left < room ? left : room;
        count_some(x + at, some, cut.shift, cut.symbol_bits, scratch);
        at += some;
        since += some;
        if (since == int64_t(1) << 30) flush();
      }
    }
    flush();
  }

  // Four tables: counting the same symbol twice in a row would wait for the first to be stored.
  __attribute__((noinline)) static void count_some(const T* x, int64_t count, int shift, int symbol_bits,
                                                   uint32_t* scratch) {
    const T mask = T((T(1) << symbol_bits) - 1);
    const int64_t size = int64_t(1) << symbol_bits;
    uint32_t *a = scratch, *b = a + size, *c = b + size, *d = c + size;
    const T* const end = x + count;
    for (; end - x >= 4; x += 4) {
      ++a[T(x[0] >> shift) & mask];
      ++b[T(x[1] >> shift) & mask];
      ++c[T(x[2] >> shift) & mask];
      ++d[T(x[3] >> shift) & mask];
    }
    for (; x < end; ++x) ++a[T(*x >> shift) & mask];
  }

  static void pack(const T* rest, int64_t begin, int64_t count, int width, int64_t total, uint8_t* planes) {
    int left = width;
    for (int size = 32; size >= 8; size /= 2)
      while (left >= size) {
        left -= size;
        uint8_t* p = planes + begin * (size / 8);
        if (size == 8)
          for (int64_t i = 0; i < count; ++i) p[i] = uint8_t(rest[i] >> left);
        if (size == 16)
          for (int64_t i = 0; i < count; ++i) reinterpret_cast<Loose16*>(p)[i].v = uint16_t(rest[i] >> left);
        if (size == 32)
          for (int64_t i = 0; i < count; ++i)
            reinterpret_cast<Loose32*>(p)[i].v = uint32_t(uint64_t(rest[i]) >> left);
        planes += total * (size / 8);
      }
    if (left == 0) return;
    uint8_t low[kStrip];
    for (int64_t i = 0; i < count; ++i) low[i] = uint8_t(rest[i]);
    pack_low(low, begin, count, left, total, planes);
  }

  // What is packed in less than a byte goes to `low` (if it is anything), the whole bytes above it to `rest`.
  static void unpack(T* rest, uint8_t* low, int64_t begin, int64_t count, int width, int64_t total,
                     const uint8_t* planes) {
    int left = width;
    bool first = true;
    for (int size = 32; size >= 8; size /= 2)
      while (left >= size) {
        left -= size;
        const uint8_t* p = planes + begin * (size / 8);
        const auto put = [&](int64_t i, T v) { rest[i] = T(first ? v : T(rest[i] | v)); };
        if (size == 8)
          for (int64_t i = 0; i < count; ++i) put(i, T(T(p[i]) << left));
        if (size == 16)
          for (int64_t i = 0; i < count; ++i)
            put(i, T(uint64_t(reinterpret_cast<const Loose16*>(p)[i].v) << left));
        if (size == 32)
          for (int64_t i = 0; i < count; ++i)
            put(i, T(uint64_t(reinterpret_cast<const Loose32*>(p)[i].v) << left));
        planes += total * (size / 8);
        first = false;
      }
    if (left) unpack_low(low, begin, count, left, total, planes);
  }

  // What `entry` says of symbols, by arithmetic: its entries count up with the symbols but for at most two gaps.
  struct Entries {
    int gaps = 0;
    bool simple = true;
    T first = 0, range = 0, below[2] = {}, above[2] = {}, step[2] = {};

    Entries(const uint8_t* entry, int escape, int64_t size) {
      int64_t last = -1;
      for (int64_t s = 0; s < size; ++s) {
        if (entry[s] == escape) continue;
        if (last < 0) {
          first = T(s);
        } else if (s != last + 1) {
          if (gaps < 2) {
            below[gaps] = T(last);
            above[gaps] = T(s);
            step[gaps] = T(s - last - 1);
          }
          ++gaps;
        }
        last = s;
      }
      range = T(last - first);
      simple = gaps <= 2 && last >= 0;
    }

    template <int N>
    void find(const T* from, int shift, T mask, uint8_t escape, uint8_t* out, int64_t run) const {
      const T a = first, r = range, b0 = below[0], b1 = below[1], a0 = above[0], a1 = above[1], s0 = step[0], s1 = step[1];
      for (int64_t j = 0; j < run; ++j) {
        const T s = T(T(from[j] >> shift) & mask);
        T c = T(s - a);
        bool none = c > r;
        if (N > 0) {
          none |= (s > b0) & (s < a0);
          c = T(c - (s >= a0 ? s0 : T(0)));
        }
        if (N > 1) {
          none |= (s > b1) & (s < a1);
          c = T(c - (s >= a1 ? s1 : T(0)));
        }
        out[j] = none ? escape : uint8_t(c);
      }
    }
  };

  static int64_t split(const Cut& cut, const int64_t* chosen, int64_t begin, int64_t size, int64_t total,
                       const uint8_t* entry, int escape, uint8_t* symbols, uint8_t* planes, uint16_t* escaped) {
    const T* x = static_cast<const T*>(cut.rows);
    const T mask = T((T(1) << cut.symbol_bits) - 1);
    const T low = T((T(1) << cut.shift) - 1);
    const int top = int(sizeof(T)) * 8 - 1, up = cut.shift - cut.drop;
    const Left put_sign(up);
    const Entries entries(entry, escape, int64_t(1) << cut.symbol_bits);
    const bool narrow = up + cut.sign <= 8;
    T rest[kStrip];
    uint8_t bytes[kStrip];
    int64_t escapes = 0, row = begin / cut.length, within = begin % cut.length;
    for (const int64_t last = begin + size; begin < last; begin += kStrip) {
      const int64_t some = last - begin < kStrip ? last - begin : kStrip;
      for (int64_t i = 0; i < some;) {
        const T* from = x + chosen[row] * cut.length + within;
        if (within == 0 && (row + 1) * cut.length < last)
          fetch(x + chosen[row + 1] * cut.length, cut.length);
        const int64_t run = cut.length - within < some - i ? cut.length - within : some - i;
        if (!entries.simple)
          for (int64_t j = 0; j < run; ++j) symbols[i + j] = entry[T(from[j] >> cut.shift) & mask];
        else if (entries.gaps == 0)
          entries.template find<0>(from, cut.shift, mask, uint8_t(escape), symbols + i, run);
        else if (entries.gaps == 1)
          entries.template find<1>(from, cut.shift, mask, uint8_t(escape), symbols + i, run);
        else
          entries.template find<2>(from, cut.shift, mask, uint8_t(escape), symbols + i, run);
        if (escaped != nullptr) {
          const uint8_t *at = symbols + i, *end = at + run;
          while ((at = static_cast<const uint8_t*>(memchr(at, escape, size_t(end - at)))) != nullptr) {
            escaped[escapes++] = uint16_t(T(from[at - (symbols + i)] >> cut.shift) & mask);
            if (++at == end) break;
          }
        }
        if (narrow)
          for (int64_t j = 0; j < run; ++j)
            bytes[i + j] =
                uint8_t(T(T(from[j] & low) >> cut.drop) | (cut.sign ? put_sign(T(from[j] >> top)) : T(0)));
        else if (cut.sign && cut.drop == 0)
          for (int64_t j = 0; j < run; ++j) rest[i + j] = T(T(from[j] & low) | put_sign(T(from[j] >> top)));
        else if (cut.sign)
          for (int64_t j = 0; j < run; ++j)
            rest[i + j] = T(T(T(from[j] & low) >> cut.drop) | put_sign(T(from[j] >> top)));
        else
          for (int64_t j = 0; j < run; ++j) rest[i + j] = T(T(from[j] & low) >> cut.drop);
        i += run;
        within += run;
        if (within == cut.length) {
          within = 0;
          ++row;
        }
      }
      if (!narrow)
        pack(rest, begin, some, up + cut.sign, total, planes);
      else if (up + cut.sign == 8)
        memcpy(planes + begin, bytes, size_t(some));
      else
        pack_low(bytes, begin, some, up + cut.sign, total, planes);
      symbols += some;
    }
    return escapes;
  }

  // Where the entries' symbols leave some out: most tables do so once or twice, if at all.
  struct Gaps {
    int count = 0;
    T first = 0, at[2] = {}, step[2] = {};
    T table[256];

    Gaps(const Cut& cut, const capibara::Group& group) {
      for (int i = 0; i < 256; ++i) table[i] = T(group.values[i] << cut.shift);
      first = T(group.values[0]);
      for (int i = 1; i < group.escape; ++i) {
        const uint64_t step_here = group.values[i] - group.values[i - 1] - 1;
        if (step_here == 0) continue;
        if (count < 2) {
          at[count] = T(i);
          step[count] = T(step_here);
        }
        ++count;
      }
    }
  };

  // Puts numbers together from their symbols and the rest: its whole bytes, as they lie in planes or in `rest`, and the
  // bits below them.
  enum Whole { kNoWhole, kByte, kHalf, kHalfAndByte, kAny };

  struct Fields {
    const uint8_t *halves, *bytes, *low;
    const T* rest;
    int left;  // bits below the halves
  };

  template <int whole, bool others>
  static T field(const Fields& f, int64_t j) {
    T v = others ? T(f.low[j]) : T(0);
    if (whole == kByte || whole == kHalfAndByte) v = T(v | f.bytes[j]);
    if (whole == kHalf || whole == kHalfAndByte) v = T(v | T(T(load16(f.halves + 2 * j)) << f.left));
    if (whole == kAny) v = T(v | f.rest[j]);
    return v;
  }

  // How a symbol and the rest become a number.
  struct Join {
    T mask, add, negative;
    Left up, put, put_sign;
    bool sign, alternating;

    explicit Join(const Cut& cut)
        : mask(T((T(1) << (cut.shift - cut.drop)) - 1)),
          add(T(cut.base)),
          negative(T(T(1) << (cut.shift - cut.drop))),
          up(cut.shift),
          put(cut.drop),
          put_sign(int(sizeof(T)) * 8 - 1 - (cut.shift - cut.drop)),
          sign(cut.sign),
          alternating(cut.alternating) {}

    T with_sign(T above, T rest) const { return T(above | put(T(rest & mask)) | put_sign(T(rest & negative))); }
    T folded(T above, T rest) const {
      const T v = T(above | put(rest));
      return T(T(v >> 1) ^ T(T(~T(v & 1)) + 1));
    }
    T shifted(T above, T rest) const { return T(T(above | put(rest)) + add); }
    T operator()(T above, T rest) const {
      return sign ? with_sign(above, rest) : alternating ? folded(above, rest) : shifted(above, rest);
    }
  };

#if defined(__AVX2__)
  // As below, for 16 or 8 numbers with a sign at a time; returns how many were done.
  template <int N, int whole, bool others>
  static int64_t place_many(const Join& join, const Gaps& gaps, T* __restrict to, const uint8_t* __restrict code,
                            const Fields& from, int64_t run) {
    constexpr bool two = sizeof(T) == 2;
    constexpr int64_t step = 32 / int64_t(sizeof(T));
    const Fields f = from;
    const auto all = [](T v) { return two ? _mm256_set1_epi16(int16_t(v)) : _mm256_set1_epi32(int32_t(v)); };
    const auto plus = [](__m256i a, __m256i b) { return two ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b); };
    const auto left = [](__m256i a, __m128i by) { return two ? _mm256_sll_epi16(a, by) : _mm256_sll_epi32(a, by); };
    const auto above = [](__m256i a, __m256i b) { return two ? _mm256_cmpgt_epi16(a, b) : _mm256_cmpgt_epi32(a, b); };
    const auto bytes = [](const uint8_t* p) {
      return two ? _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))
                 : _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    };
    const __m256i first = all(gaps.first), mask = all(join.mask), negative = all(join.negative);
    const __m256i at0 = all(T(gaps.at[0] - 1)), at1 = all(T(gaps.at[1] - 1));
    const __m256i step0 = all(gaps.step[0]), step1 = all(gaps.step[1]);
    const __m128i up = _mm_cvtsi32_si128(join.up.by), put = _mm_cvtsi32_si128(join.put.by);
    const __m128i put_sign = _mm_cvtsi32_si128(join.put_sign.by), put_half = _mm_cvtsi32_si128(f.left);
    int64_t j = 0;
    for (; j + step <= run; j += step) {
      const __m256i c = bytes(code + j);
      __m256i v = plus(c, first);
      if (N > 0) v = plus(v, _mm256_and_si256(above(c, at0), step0));
      if (N > 1) v = plus(v, _mm256_and_si256(above(c, at1), step1));
      v = left(v, up);
      __m256i r = others ? bytes(f.low + j) : _mm256_setzero_si256();
      if (whole == kByte || whole == kHalfAndByte) r = _mm256_or_si256(r, bytes(f.bytes + j));
      if (whole == kHalf || whole == kHalfAndByte)
        r = _mm256_or_si256(r, left(_mm256_cvtepu16_epi32(_mm_loadu_si128(
                                        reinterpret_cast<const __m128i*>(f.halves + 2 * j))),
                                    put_half));
      v = _mm256_or_si256(v, left(_mm256_and_si256(r, mask), put));
      v = _mm256_or_si256(v, left(_mm256_and_si256(r, negative), put_sign));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), v);
    }
    return j;
  }
#endif

  // The bits above the rest are found by arithmetic where that is possible: unlike looking up, vectors do it.
  template <int N, int whole, bool others>
  static void place(const Join& join, const Gaps& gaps, T* __restrict to, const uint8_t* __restrict code,
                    const Fields& from, int64_t run) {
    const Fields f = from;
    const Join with = join;
    const T first = gaps.first, at0 = gaps.at[0], at1 = gaps.at[1], step0 = gaps.step[0], step1 = gaps.step[1];
    const T* table = gaps.table;
    const auto above = [=](int64_t j) {
      const T c = code[j];
      if (N > 2) return table[c];
      T v = T(c + first);
      if (N > 0) v = T(v + (c >= at0 ? step0 : T(0)));
      if (N > 1) v = T(v + (c >= at1 ? step1 : T(0)));
      return with.up(v);
    };
    int64_t begin = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(T) == 2 || sizeof(T) == 4)
      if (N <= 2 && with.sign && whole != kAny) begin = place_many<N, whole, others>(join, gaps, to, code, f, run);
#endif
    if (with.sign)
      for (int64_t j = begin; j < run; ++j) to[j] = with.with_sign(above(j), field<whole, others>(f, j));
    else if (whole != kNoWhole && whole != kAny)
      return;  // what has no sign does not come this way
    else if (with.alternating)
      for (int64_t j = 0; j < run; ++j) to[j] = with.folded(above(j), field<whole, others>(f, j));
    else
      for (int64_t j = 0; j < run; ++j) to[j] = with.shifted(above(j), field<whole, others>(f, j));
  }

  using Place = void (*)(const Join&, const Gaps&, T* __restrict, const uint8_t* __restrict, const Fields&, int64_t);

  template <int whole, bool others>
  static Place by_gaps(int gaps) {
    return gaps == 0 ? place<0, whole, others> : gaps <= 2 ? place<2, whole, others> : place<3, whole, others>;
  }

  static capibara::Outcome restore(const Cut& cut, void* out, const capibara::Group& group) {
    T* x = static_cast<T*>(out);
    const int width = cut.shift - cut.drop + cut.sign;
    const int64_t total = group.rows * cut.length;
    const Gaps gaps(cut, group);
    const Join join(cut);
    // Floats have their whole bytes in one plane or two, which are read where they lie.
    const int whole = width < 8                                          ? kNoWhole
                      : cut.sign && width == 8                           ? kByte
                      : cut.sign && sizeof(T) > 2 && width == 24         ? kHalfAndByte
                      : cut.sign && sizeof(T) > 2 && width >= 16 && width < 24 ? kHalf
                                                                         : kAny;
    const bool others = width % 8 != 0;
    Place put = others ? by_gaps<kAny, true>(gaps.count) : by_gaps<kAny, false>(gaps.count);
    if (whole == kNoWhole) put = others ? by_gaps<kNoWhole, true>(gaps.count) : by_gaps<kNoWhole, false>(gaps.count);
    if (whole == kByte) put = by_gaps<kByte, false>(gaps.count);
    if constexpr (sizeof(T) > 2) {
      if (whole == kHalf) put = others ? by_gaps<kHalf, true>(gaps.count) : by_gaps<kHalf, false>(gaps.count);
      if (whole == kHalfAndByte) put = by_gaps<kHalfAndByte, false>(gaps.count);
    }
    const int whole_bits = whole == kByte ? 8 : whole == kHalf ? 16 : whole == kHalfAndByte ? 24 : 0;
    T rest[kStrip];
    uint8_t code[kStrip], low[kStrip];
    Lanes lanes;
    int64_t found = 0, row = 0, within = 0;
    const capibara::Block* block = group.blocks;
    for (int64_t begin = 0; begin < total; begin += kStrip) {
      const int64_t size = total - begin < kStrip ? total - begin : kStrip;
      if (begin % kBlock == 0) lanes.open(*block++);
      if (!lanes.decode(group.table, code, size)) return capibara::kUneven;
      if ((begin + size == total || (begin + size) % kBlock == 0) && !lanes.even()) return capibara::kUneven;
      if (whole == kAny)
        unpack(rest, low, begin, size, width, total, group.planes);
      else if (others)
        unpack_low(low, begin, size, width - whole_bits, total, group.planes + total * (whole_bits / 8));
      for (int64_t i = 0; i < size;) {
        T* to = x + group.chosen[row] * cut.length + within;
        const int64_t run = cut.length - within < size - i ? cut.length - within : size - i;
        const Fields fields{group.planes + 2 * (begin + i),
                            group.planes + (whole == kHalfAndByte ? 2 * total : 0) + begin + i, low + i, rest + i,
                            width - 16};
        put(join, gaps, to, code + i, fields, run);
        if (group.escapes) {
          const uint8_t *at = code + i, *end = at + run;
          while (at < end && (at = static_cast<const uint8_t*>(memchr(at, group.escape, size_t(end - at))))) {
            if (found == group.escapes) return capibara::kEscapes;
            const int64_t j = at++ - (code + i);
            const T r = whole == kByte          ? field<kByte, false>(fields, j)
                        : whole == kHalf        ? T(field<kHalf, false>(fields, j) | (others ? T(low[i + j]) : T(0)))
                        : whole == kHalfAndByte ? field<kHalfAndByte, false>(fields, j)
                        : T((whole == kAny ? rest[i + j] : T(0)) | (others ? T(low[i + j]) : T(0)));
            to[j] = join(T(T(group.escaped[found++]) << cut.shift), r);
          }
        }
        i += run;
        within += run;
        if (within == cut.length) {
          within = 0;
          ++row;
        }
      }
    }
    return found == group.escapes ? capibara::kFine : capibara::kEscapes;
  }
};

#define CAPIBARA_BY_WIDTH(call)                  \
  switch (cut.width) {                           \
    case 1: return Numbers<uint8_t>::call;       \
    case 2: return Numbers<uint16_t>::call;      \
    case 4: return Numbers<uint32_t>::call;      \
    default: return Numbers<uint64_t>::call;     \
  }

static void measure(const Cut& cut, int64_t count, int coarse, int64_t* sums, uint64_t* ors) {
  CAPIBARA_BY_WIDTH(measure(cut, count, coarse, sums, ors))
}
static void histogram(const Cut& cut, const int64_t* chosen, int64_t count, uint32_t* scratch, int64_t* counts) {
  CAPIBARA_BY_WIDTH(histogram(cut, chosen, count, scratch, counts))
}
static int64_t split(const Cut& cut, const int64_t* chosen, int64_t begin, int64_t size, int64_t total,
                     const uint8_t* entry, int escape, uint8_t* symbols, uint8_t* planes, uint16_t* escaped) {
  CAPIBARA_BY_WIDTH(split(cut, chosen, begin, size, total, entry, escape, symbols, planes, escaped))
}
static capibara::Outcome restore(const Cut& cut, void* out, const capibara::Group& group) {
  CAPIBARA_BY_WIDTH(restore(cut, out, group))
}

// ---- checksums ---------------------------------------------------------------------------------------------------

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

extern const capibara::CodecKernels kCodec;
const capibara::CodecKernels kCodec = {measure, histogram, split, encode, restore, crc32};

}  // namespace CAPIBARA_ISA
