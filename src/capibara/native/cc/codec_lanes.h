// The entropy coder: 32 states of a block, in turn. Compiled once per instruction set.
#pragma once

#include <string.h>

#include "codec.h"
#include "codec_pack.h"

namespace CAPIBARA_ISA {

using capibara::kLanes;
using capibara::kLowest;
using capibara::kScaleBits;

constexpr uint32_t kMask = (1u << kScaleBits) - 1;

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

// Four entries of a table. With AVX-512 each load fills its lane and leaves the others, which takes no turn of the units
// that shuffle; of these there are few.
static inline __m128i four_of(const uint32_t* table, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__AVX512VL__)
  __m128i e = _mm_cvtsi32_si128(int(table[a]));
  const auto fill = [&](__mmask8 lane, const uint32_t* from) {
    asm("vpbroadcastd %2, %0%{%1%}" : "+v"(e) : "Yk"(lane), "m"(*from));
  };
  fill(2, table + b);
  fill(4, table + c);
  fill(8, table + d);
  return e;
#else
  const auto two = [table](uint32_t i, uint32_t j) {
    return _mm_insert_epi32(_mm_cvtsi32_si128(int(table[i])), int(table[j]), 1);
  };
  return _mm_unpacklo_epi64(two(a, b), two(c, d));
#endif
}

static inline __m256i join(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// Eight entries. A gather takes more time than eight loads, also where there is AVX-512 (measured on Zen 4).
static inline __m256i look_up(const uint32_t* table, __m256i at) {
  const auto four = [table](__m128i i) {
    const uint64_t first = uint64_t(_mm_cvtsi128_si64(i)), second = uint64_t(_mm_extract_epi64(i, 1));
    return four_of(table, uint32_t(first), uint32_t(first >> 32), uint32_t(second), uint32_t(second >> 32));
  };
  return join(four(_mm256_castsi256_si128(at)), four(_mm256_extracti128_si256(at, 1)));
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
  const auto& order = spread().from;
  const __m256i mask = _mm256_set1_epi32(int(kMask)), one = _mm256_set1_epi32(1);
  const __m256i low = _mm256_set1_epi32(0xffff), sixteen = _mm256_set1_epi32(16);
  const __m256i scale = _mm256_set1_epi32(1 << kScaleBits);
  __m256i v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + 8 * i));
  for (const uint8_t* at = symbols + (steps - 1) * kLanes; at >= symbols; at -= kLanes)
    for (int i = 3; i >= 0; --i) {
      const uint8_t* s = at + 8 * i;
      const __m256i entry = join(four_of(table, s[0], s[1], s[2], s[3]), four_of(table, s[4], s[5], s[6], s[7]));
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

#if defined(__AVX2__)
// Eight states whose next symbols have the entries `e`; `from` goes behind the words that they take.
static inline __m256i advance(__m256i v, __m256i e, const uint8_t*& from, const Spread& order) {
  const __m256i mask = _mm256_set1_epi32(int(kMask));
  const __m256i f = _mm256_and_si256(_mm256_srli_epi32(e, kScaleBits), mask);
  const __m256i y = _mm256_add_epi32(_mm256_mullo_epi32(f, _mm256_srli_epi32(v, kScaleBits)),
                                     _mm256_and_si256(e, mask));
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
#if defined(__AVX512VL__)
  const __mmask8 m = _mm256_cmplt_epu32_mask(y, _mm256_set1_epi32(int(kLowest)));
  const __m256i w = _mm256_maskz_expand_epi32(m, _mm256_cvtepu16_epi32(words));
  v = _mm256_mask_or_epi32(y, m, _mm256_slli_epi32(y, 16), w);
#else
  const __m256i want = _mm256_cmpeq_epi32(_mm256_srli_epi32(y, 16), _mm256_setzero_si256());
  const int m = _mm256_movemask_ps(_mm256_castsi256_ps(want));
  // Each half of the register has all the words, so that no byte has to cross over: that would take longer.
  const __m256i w = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(words),
                                        _mm256_load_si256(reinterpret_cast<const __m256i*>(order.to[m])));
  v = _mm256_or_si256(_mm256_sllv_epi32(y, _mm256_and_si256(want, _mm256_set1_epi32(16))), w);
#endif
  from += 2 * __builtin_popcount(unsigned(m));
  return v;
}

static inline __m256i entries(const uint32_t* table, __m256i v) {
  return look_up(table, _mm256_and_si256(v, _mm256_set1_epi32(int(kMask))));
}

// The 32 symbols of these entries. Packing goes by halves of a register; the permutation puts the quarters in order again.
static inline void put_symbols(const __m256i* e, uint8_t* to) {
  const __m256i low = _mm256_packus_epi32(_mm256_srli_epi32(e[0], 24), _mm256_srli_epi32(e[1], 24));
  const __m256i high = _mm256_packus_epi32(_mm256_srli_epi32(e[2], 24), _mm256_srli_epi32(e[3], 24));
  const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high),
                                                  _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), all);
}
#endif

// The lanes of a block that is being decoded, with its table.
struct Lanes {
  alignas(64) uint32_t x[kLanes];
  const uint8_t *at = nullptr, *end = nullptr;
  const uint32_t* table = nullptr;

  void open(const capibara::Block& block, const uint32_t* with) {
    for (int l = 0; l < kLanes; ++l) x[l] = load32(block.states + 4 * l);
    at = block.words;
    end = at + 2 * block.count;
    table = with;
  }

  bool even() const {
    for (int l = 0; l < kLanes; ++l)
      if (x[l] != kLowest) return false;
    return at == end;
  }

  // All places are one symbol's, which takes no bits.
  bool same() const { return (table[0] >> kScaleBits & kMask) == 0; }

  bool some(uint8_t* out, int live) {
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
  bool decode(uint8_t* symbols, int64_t count) {
    if (same()) {
      memset(symbols, int(table[0] >> 24), size_t(count));
      return true;
    }
    int64_t step = steps(symbols, count / kLanes);
    for (; step * kLanes < count; ++step) {
      const int live = int(count - step * kLanes < kLanes ? count - step * kLanes : kLanes);
      if (!some(symbols + step * kLanes, live)) return false;
    }
    return true;
  }

  // As `decode` of both. What one waits for, a look into its table, takes as long as the other one's arithmetic: so
  // the processor, which does not see far enough ahead to find that out, gets them in turn.
  static bool decode_two(Lanes& a, uint8_t* a_symbols, int64_t a_count, Lanes& b, uint8_t* b_symbols, int64_t b_count) {
    int64_t both = 0;
    if (!a.same() && !b.same())
      both = kLanes * two_steps(a, a_symbols, b, b_symbols, (a_count < b_count ? a_count : b_count) / kLanes);
    return a.decode(a_symbols + both, a_count - both) && b.decode(b_symbols + both, b_count - both);
  }

 private:
#if defined(__AVX2__)
  // Returns how many of the steps there were words for to be read without looking. Within another function there would
  // be too few registers for it.
  __attribute__((noinline)) int64_t steps(uint8_t* symbols, int64_t most) {
    int64_t step = 0;
    const Spread& order = spread();
    __m256i v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(x + 8 * i));
    const uint8_t* from = at;
    for (; step < most && end - from >= 64; ++step) {
      __m256i e[4];
      for (int i = 0; i < 4; ++i) e[i] = entries(table, v[i]);
      put_symbols(e, symbols + step * kLanes);
      for (int i = 0; i < 4; ++i) v[i] = advance(v[i], e[i], from, order);
    }
    at = from;
    for (int i = 0; i < 4; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(x + 8 * i), v[i]);
    return step;
  }

  __attribute__((noinline)) static int64_t two_steps(Lanes& one, uint8_t* one_symbols, Lanes& other,
                                                     uint8_t* other_symbols, int64_t most) {
    int64_t step = 0;
    const Spread& order = spread();
    const uint32_t *s = one.table, *t = other.table;
    const uint8_t *from = one.at, *other_from = other.at;
    __m256i v[4], w[4], e[4], f[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(one.x + 8 * i));
      w[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(other.x + 8 * i));
      e[i] = entries(s, v[i]);
    }
    for (; step < most && one.end - from >= 64 && other.end - other_from >= 64; ++step) {
      put_symbols(e, one_symbols + step * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        f[i] = entries(t, w[i]);
        v[i] = advance(v[i], e[i], from, order);
      }
      put_symbols(f, other_symbols + step * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        e[i] = entries(s, v[i]);
        w[i] = advance(w[i], f[i], other_from, order);
      }
    }
    one.at = from;
    other.at = other_from;
    for (int i = 0; i < 4; ++i) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(one.x + 8 * i), v[i]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(other.x + 8 * i), w[i]);
    }
    return step;
  }
#else
  int64_t steps(uint8_t*, int64_t) { return 0; }
  static int64_t two_steps(Lanes&, uint8_t*, Lanes&, uint8_t*, int64_t) { return 0; }
#endif
};

}  // namespace CAPIBARA_ISA
