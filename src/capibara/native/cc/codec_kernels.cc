// The codec's loops, compiled once per instruction set.
#include "codec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace CAPIBARA_ISA {

using capibara::Cut;
using capibara::kLanes;
using capibara::kLowest;
using capibara::kScaleBits;

constexpr uint32_t kMask = (1u << kScaleBits) - 1;
struct Four {
  uint32_t v;
} __attribute__((packed, may_alias));

constexpr int64_t kStrip = 4096;  // numbers at a time, so that what is between two loops stays in the cache

// ---- numbers cut in two ------------------------------------------------------------------------------------------

template <typename T>
struct Numbers {
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

  static void histogram(const Cut& cut, int64_t count, const uint8_t* kind, int64_t* histogram) {
    const T* x = static_cast<const T*>(cut.rows);
    const T mask = T((T(1) << cut.symbol_bits) - 1);
    for (int64_t r = 0; r < count; ++r, x += cut.length) {
      int64_t* h = histogram + (int64_t(kind[r]) << cut.symbol_bits);
      for (int64_t i = 0; i < cut.length; ++i) ++h[T(x[i] >> cut.shift) & mask];
    }
  }

  // Field `v` of `width` bits at position i of planes that hold `total` fields.
  static void pack(const T* rest, int64_t begin, int64_t count, int width, int64_t total, uint8_t* planes) {
    int left = width;
    for (int size = 32; size; size /= 2)
      while (left >= size) {
        left -= size;
        if (size >= 8) {
          uint8_t* p = planes + begin * (size / 8);
          for (int64_t i = 0; i < count; ++i) {
            const uint64_t v = uint64_t(rest[i]) >> left;
            if (size == 8) p[i] = uint8_t(v);
            if (size == 16) reinterpret_cast<Loose16*>(p)[i].v = uint16_t(v);
            if (size == 32) reinterpret_cast<Loose32*>(p)[i].v = uint32_t(v);
          }
        } else {
          const int each = 8 / size;
          const uint8_t mask = uint8_t((1 << size) - 1);
          uint8_t* p = planes + begin / each;  // begin is a multiple of 8, but for the last strip of a group
          int64_t i = 0;
          if (each == 2)
            for (; i + 2 <= count; i += 2)
              *p++ = uint8_t((uint8_t(rest[i] >> left) & 15) | (uint8_t(rest[i + 1] >> left) << 4));
          if (each == 4)
            for (; i + 4 <= count; i += 4)
              *p++ = uint8_t((uint8_t(rest[i] >> left) & 3) | (uint8_t(rest[i + 1] >> left) & 3) << 2 |
                             (uint8_t(rest[i + 2] >> left) & 3) << 4 | (uint8_t(rest[i + 3] >> left) & 3) << 6);
          for (int at = 0; i < count; ++i) {
            if (at == 0) *p = 0;
            *p = uint8_t(*p | (uint8_t(rest[i] >> left) & mask) << (at * size));
            if (++at == each) {
              at = 0;
              ++p;
            }
          }
        }
        planes += (total * size + 7) / 8;
      }
  }

  static void unpack(T* rest, int64_t begin, int64_t count, int width, int64_t total, const uint8_t* planes) {
    for (int64_t i = 0; i < count; ++i) rest[i] = 0;
    int left = width;
    for (int size = 32; size; size /= 2)
      while (left >= size) {
        left -= size;
        if (size >= 8) {
          const uint8_t* p = planes + begin * (size / 8);
          if (size == 8)
            for (int64_t i = 0; i < count; ++i) rest[i] = T(rest[i] | T(T(p[i]) << left));
          if (size == 16)
            for (int64_t i = 0; i < count; ++i)
              rest[i] = T(rest[i] | T(uint64_t(reinterpret_cast<const Loose16*>(p)[i].v) << left));
          if (size == 32)
            for (int64_t i = 0; i < count; ++i)
              rest[i] = T(rest[i] | T(uint64_t(reinterpret_cast<const Loose32*>(p)[i].v) << left));
        } else {
          const int each = 8 / size;
          const uint8_t mask = uint8_t((1 << size) - 1);
          const uint8_t* p = planes + begin / each;
          int64_t i = 0;
          if (each == 2)
            for (; i + 2 <= count; i += 2, ++p) {
              rest[i] = T(rest[i] | T(T(*p & 15) << left));
              rest[i + 1] = T(rest[i + 1] | T(T(*p >> 4) << left));
            }
          if (each == 4)
            for (; i + 4 <= count; i += 4, ++p) {
              rest[i] = T(rest[i] | T(T(*p & 3) << left));
              rest[i + 1] = T(rest[i + 1] | T(T(*p >> 2 & 3) << left));
              rest[i + 2] = T(rest[i + 2] | T(T(*p >> 4 & 3) << left));
              rest[i + 3] = T(rest[i + 3] | T(T(*p >> 6) << left));
            }
          for (int at = 0; i < count; ++i) {
            rest[i] = T(rest[i] | T(T(*p >> (at * size) & mask) << left));
            if (++at == each) {
              at = 0;
              ++p;
            }
          }
        }
        planes += (total * size + 7) / 8;
      }
  }

  struct Loose16 {
    uint16_t v;
  } __attribute__((packed, may_alias));
  struct Loose32 {
    uint32_t v;
  } __attribute__((packed, may_alias));

  static int64_t split(const Cut& cut, const int64_t* chosen, int64_t count, const uint8_t* entry, int escape,
                       uint8_t* symbols, uint8_t* planes, uint16_t* escaped) {
    const T* x = static_cast<const T*>(cut.rows);
    const T mask = T((T(1) << cut.symbol_bits) - 1);
    const T low = T((T(1) << cut.shift) - 1);
    const int top = int(sizeof(T)) * 8 - 1, up = cut.shift - cut.drop;
    const int64_t total = count * cut.length;
    T rest[kStrip];
    int64_t escapes = 0, row = 0, within = 0;
    for (int64_t begin = 0; begin < total; begin += kStrip) {
      const int64_t size = total - begin < kStrip ? total - begin : kStrip;
      for (int64_t i = 0; i < size;) {
        const T* from = x + chosen[row] * cut.length + within;
        const int64_t run = cut.length - within < size - i ? cut.length - within : size - i;
        for (int64_t j = 0; j < run; ++j) {
          const T v = from[j];
          const uint32_t symbol = uint32_t(T(v >> cut.shift) & mask);
          const uint8_t code = entry[symbol];
          symbols[begin + i + j] = code;
          if (__builtin_expect(code == escape, 0)) escaped[escapes++] = uint16_t(symbol);
        }
        if (cut.sign)
          for (int64_t j = 0; j < run; ++j)
            rest[i + j] = T(T(T(from[j] & low) >> cut.drop) | T(T(from[j] >> top) << up));
        else
          for (int64_t j = 0; j < run; ++j) rest[i + j] = T(T(from[j] & low) >> cut.drop);
        i += run;
        within += run;
        if (within == cut.length) {
          within = 0;
          ++row;
        }
      }
      pack(rest, begin, size, up + cut.sign, total, planes);
    }
    return escapes;
  }

  static int64_t join(const Cut& cut, void* rows, const int64_t* chosen, int64_t count, const uint64_t* values,
                      int escape, const uint8_t* symbols, const uint8_t* planes, const uint16_t* escaped,
                      int64_t escapes, uint64_t base) {
    T* x = static_cast<T*>(rows);
    const int top = int(sizeof(T)) * 8 - 1, up = cut.shift - cut.drop;
    const T low = T((T(1) << up) - 1), add = T(base);
    const int64_t total = count * cut.length;
    T table[256], rest[kStrip];
    for (int i = 0; i < 256; ++i) table[i] = T(values[i] << cut.shift);
    int64_t found = 0, row = 0, within = 0;
    for (int64_t begin = 0; begin < total; begin += kStrip) {
      const int64_t size = total - begin < kStrip ? total - begin : kStrip;
      unpack(rest, begin, size, up + cut.sign, total, planes);
      for (int64_t i = 0; i < size;) {
        T* to = x + chosen[row] * cut.length + within;
        const int64_t run = cut.length - within < size - i ? cut.length - within : size - i;
        const uint8_t* code = symbols + begin + i;
        if (cut.sign)
          for (int64_t j = 0; j < run; ++j)
            to[j] = T(table[code[j]] | T(T(rest[i + j] & low) << cut.drop) | T(T(rest[i + j] >> up) << top));
        else
          for (int64_t j = 0; j < run; ++j) to[j] = T((table[code[j]] | T(rest[i + j] << cut.drop)) + add);
        if (escapes)
          for (int64_t j = 0; j < run; ++j)
            if (code[j] == escape) {
              if (found == escapes) return -1;
              // The table has 0 for an escape, so only its bits are missing.
              if (cut.sign)
                to[j] = T(to[j] | T(T(escaped[found]) << cut.shift));
              else
                to[j] = T(to[j] + T(T(escaped[found]) << cut.shift));
              ++found;
            }
        i += run;
        within += run;
        if (within == cut.length) {
          within = 0;
          ++row;
        }
      }
    }
    return found;
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
static void histogram(const Cut& cut, int64_t count, const uint8_t* kind, int64_t* h) {
  CAPIBARA_BY_WIDTH(histogram(cut, count, kind, h))
}
static int64_t split(const Cut& cut, const int64_t* chosen, int64_t count, const uint8_t* entry, int escape,
                     uint8_t* symbols, uint8_t* planes, uint16_t* escaped) {
  CAPIBARA_BY_WIDTH(split(cut, chosen, count, entry, escape, symbols, planes, escaped))
}
static int64_t join(const Cut& cut, void* rows, const int64_t* chosen, int64_t count, const uint64_t* values,
                    int escape, const uint8_t* symbols, const uint8_t* planes, const uint16_t* escaped,
                    int64_t escapes, uint64_t base) {
  CAPIBARA_BY_WIDTH(join(cut, rows, chosen, count, values, escape, symbols, planes, escaped, escapes, base))
}

// ---- the coder ---------------------------------------------------------------------------------------------------

static int64_t encode(const uint8_t* symbols, int64_t count, const uint16_t* frequency, const uint16_t* start,
                      uint32_t* states, uint16_t* words_end) {
  uint32_t x[kLanes];
  for (int l = 0; l < kLanes; ++l) x[l] = kLowest;
  uint16_t* out = words_end;
  const int64_t steps = (count + kLanes - 1) / kLanes;
  for (int64_t step = steps - 1; step >= 0; --step) {
    const int live = int(count - step * kLanes < kLanes ? count - step * kLanes : kLanes);
    const uint8_t* s = symbols + step * kLanes;
    for (int l = live - 1; l >= 0; --l) {
      const uint32_t f = frequency[s[l]];
      if (__builtin_expect(f == 0, 0)) return -1;
      uint32_t v = x[l];
      const bool full = v >= uint64_t(f) << (32 - kScaleBits);
      out[-1] = uint16_t(v);
      out -= full;
      v = full ? v >> 16 : v;
      x[l] = (v / f << kScaleBits) + v % f + start[s[l]];
    }
  }
  for (int l = 0; l < kLanes; ++l) states[l] = x[l];
  return words_end - out;
}

static int decode_some(uint32_t* x, const uint16_t*& at, const uint16_t* end, const uint32_t* table, uint8_t* out,
                       int live) {
  for (int l = 0; l < live; ++l) {
    const uint32_t e = table[x[l] & kMask];
    out[l] = uint8_t(e);
    x[l] = ((e >> 8 & kMask) + 1) * (x[l] >> kScaleBits) + (e >> 20);
    if (x[l] < kLowest) {
      if (at == end) return 1;
      x[l] = x[l] << 16 | *at++;
    }
  }
  return 0;
}

static int decode(const uint32_t* states, const uint16_t* words, int64_t count_words, const uint32_t* table,
                  uint8_t* symbols, int64_t count) {
  alignas(64) uint32_t x[kLanes];
  for (int l = 0; l < kLanes; ++l) x[l] = states[l];
  const uint16_t *at = words, *end = words + count_words;
  int64_t step = 0;
  [[maybe_unused]] const int64_t full = count / kLanes;
#if defined(__AVX2__)
  // Where each of the next words goes, for each of the 256 sets of lanes that want one.
  static const struct Spread {
    alignas(32) uint32_t to[256][8];
    Spread() {
      for (int m = 0; m < 256; ++m)
        for (int l = 0, n = 0; l < 8; ++l) to[m][l] = (m >> l & 1) ? uint32_t(n++) : 0;
    }
  } spread;
  __m256i v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(x + 8 * i));
  const __m256i mask = _mm256_set1_epi32(int(kMask)), one = _mm256_set1_epi32(1);
  const __m256i bytes = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                                         -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i zero = _mm256_setzero_si256();
  for (; step < full && end - at >= 32; ++step)
    for (int i = 0; i < 4; ++i) {
      const __m256i e = _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), _mm256_and_si256(v[i], mask), 4);
      const __m256i packed = _mm256_shuffle_epi8(e, bytes);
      uint8_t* out = symbols + step * kLanes + i * 8;
      *reinterpret_cast<Four*>(out) = {uint32_t(_mm256_extract_epi32(packed, 0))};
      *reinterpret_cast<Four*>(out + 4) = {uint32_t(_mm256_extract_epi32(packed, 4))};
      const __m256i f = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(e, 8), mask), one);
      const __m256i y =
          _mm256_add_epi32(_mm256_mullo_epi32(f, _mm256_srli_epi32(v[i], kScaleBits)), _mm256_srli_epi32(e, 20));
      const __m256i want = _mm256_cmpeq_epi32(_mm256_srli_epi32(y, 16), zero);
      const int m = _mm256_movemask_ps(_mm256_castsi256_ps(want));
      const __m256i w = _mm256_permutevar8x32_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))),
          _mm256_load_si256(reinterpret_cast<const __m256i*>(spread.to[m])));
      v[i] = _mm256_blendv_epi8(y, _mm256_or_si256(_mm256_slli_epi32(y, 16), w), want);
      at += __builtin_popcount(unsigned(m));
    }
  for (int i = 0; i < 4; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(x + 8 * i), v[i]);
#endif
  for (; step * kLanes < count; ++step) {
    const int live = int(count - step * kLanes < kLanes ? count - step * kLanes : kLanes);
    if (decode_some(x, at, end, table, symbols + step * kLanes, live)) return 1;
  }
  if (at != end) return 1;
  for (int l = 0; l < kLanes; ++l)
    if (x[l] != kLowest) return 1;
  return 0;
}

extern const capibara::CodecKernels kCodec;
const capibara::CodecKernels kCodec = {measure, histogram, split, join, encode, decode};

}  // namespace CAPIBARA_ISA
