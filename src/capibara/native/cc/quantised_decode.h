// Codes as numbers, for one instruction set.
//
// Columns are read a chunk at a time. Of codes of four bits a chunk has the even columns first and then the odd ones: so
// they come out of their bytes. Whatever is multiplied by them is put into the same order beforehand, which is called
// `arranged`; columns behind the last whole chunk of a row keep theirs.
//
// Where instructions work on the halves of a vector apart, 64 columns can be read `halved` instead: the first 32 lie in
// the lower halves of eight vectors, the others in the upper ones. The lower half of the first vector has columns 0, 4, 8
// and 12, those of the next three have as many from 2, 16 and 18 on, and the other four vectors the odd columns likewise.
// Two groups of 32 then share all that is done for a group.
#pragma once

#include "quantised.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Codes;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
static inline int64_t up(int64_t n, int64_t size) { return parts(n, size) * size; }

struct Bytes {
  uint8_t at[kWidth];
};

// kWidth bytes as integers of 32 bits. GCC 12 converts vectors of bytes one by one.
static inline __attribute__((always_inline)) IntVec widen(const int8_t* p) {
#if defined(__AVX2__)
  IntVec y;
  asm("vpmovsxbd %1, %0" : "=v"(y) : "m"(*reinterpret_cast<const Bytes*>(p)));
  return y;
#else
  return (IntVec){p[0], p[1], p[2], p[3]};
#endif
}
static inline __attribute__((always_inline)) WordVec widen(const uint8_t* p) {
#if defined(__AVX2__)
  WordVec y;
  asm("vpmovzxbd %1, %0" : "=v"(y) : "m"(*reinterpret_cast<const Bytes*>(p)));
  return y;
#else
  return (WordVec){p[0], p[1], p[2], p[3]};
#endif
}

// Codes of eight bits, which are the levels.
struct Eight {
  static constexpr int kVecs = 1;  // vectors of a chunk
  static constexpr int kMostVecs = 4;  // of chunks that are read at once
  static constexpr int kHalved = 0;    // columns that can be read at once, halved
  static constexpr int kChunk = kWidth;
  static inline int64_t byte(int64_t column) { return column; }
  struct Table {
    explicit Table(const Codes&) {}
  };
  // V vectors of numbers, kVecs of each chunk.
  template <int V>
  static inline __attribute__((always_inline)) void read(const uint8_t* p, const Table&, Vec* to) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      to[v] = __builtin_convertvector(widen(reinterpret_cast<const int8_t*>(p) + v * kWidth), Vec);
  }
  static inline float level(const Codes&, const uint8_t* row, int64_t column) {
    return float(int8_t(row[column]));
  }
};

// Of codes of four bits: numbers that bfloat16 has, or integers of 16 bits, as archives have them.
enum class Levels { kAny, kBfloat16, kWhole };
constexpr float kWholeZero = 12582912 + 32768;  // 1.5 * 2^23, and as much as the integers may be below 0

#if defined(__AVX2__) && !defined(__AVX512F__)
typedef uint8_t ByteVec __attribute__((vector_size(32)));
typedef uint32_t LooseWords __attribute__((vector_size(16), aligned(1), may_alias));

// The levels of 32 codes in the order of two chunks: a shuffle of bytes looks up one byte of the levels of all, and the
// bytes are put together. Of bfloat16 the lower two bytes are zeros. Integers are the lower half of a float between 2^23
// and 2^24, where neighbours differ by one; the float of 0 is subtracted.
template <Levels kLevels>
static inline __attribute__((always_inline)) void look_up(const uint8_t* p, const ByteVec* planes, Vec* to) {
  // Of each half of the bytes that will lie in a lane, the lower and the upper codes.
  const ByteVec places = {0, 1, 2, 3, 0, 1, 2, 3, 8,  9,  10, 11, 8,  9,  10, 11,
                          4, 5, 6, 7, 4, 5, 6, 7, 12, 13, 14, 15, 12, 13, 14, 15};
  const WordVec by = {0, 4, 0, 4, 0, 4, 0, 4};
  ByteVec both, found[4], pairs[4];
  asm("vbroadcasti128 %1, %0" : "=x"(both) : "m"(*reinterpret_cast<const LooseWords*>(p)));
  asm("vpshufb %2, %1, %0" : "=x"(both) : "x"(both), "xm"(places));
  const ByteVec codes = (ByteVec)((WordVec)both >> by) & 15;
  constexpr int kFirst = kLevels == Levels::kBfloat16 ? 2 : 0, kEnd = kLevels == Levels::kWhole ? 2 : 4;
#pragma GCC unroll 4
  for (int i = kFirst; i < kEnd; ++i) asm("vpshufb %2, %1, %0" : "=x"(found[i]) : "x"(planes[i]), "x"(codes));
#pragma GCC unroll 2
  for (int i = kFirst / 2; i < kEnd / 2; ++i) {
    asm("vpunpcklbw %2, %1, %0" : "=x"(pairs[2 * i]) : "x"(found[2 * i]), "x"(found[2 * i + 1]));
    asm("vpunpckhbw %2, %1, %0" : "=x"(pairs[2 * i + 1]) : "x"(found[2 * i]), "x"(found[2 * i + 1]));
  }
  if (kLevels == Levels::kBfloat16) pairs[0] = pairs[1] = (ByteVec){};
  if (kLevels == Levels::kWhole) pairs[2] = pairs[3] = (ByteVec)(WordVec{} + 0x4B404B40u);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    asm("vpunpcklwd %2, %1, %0" : "=x"(to[2 * i]) : "x"(pairs[i]), "x"(pairs[2 + i]));
    asm("vpunpckhwd %2, %1, %0" : "=x"(to[2 * i + 1]) : "x"(pairs[i]), "x"(pairs[2 + i]));
  }
  if (kLevels == Levels::kWhole)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) to[i] -= kWholeZero;
}

// The levels of the even ones of 64 codes, or of the odd ones, halved: no code has to move before it is looked up. Levels
// are numbers that bfloat16 has, so that shifts and masks make floats of them, on other units than those that shuffle.
static inline __attribute__((always_inline)) void look_up_halved(const uint8_t* p, bool odd, const ByteVec* planes,
                                                                 Vec* to) {
  typedef uint8_t LooseBytes __attribute__((vector_size(32), aligned(1), may_alias));
  const ByteVec both = *reinterpret_cast<const LooseBytes*>(p);
  const ByteVec codes = (odd ? (ByteVec)((WordVec)both >> 4) : both) & 15;
  ByteVec found[2];
  WordVec pairs[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) asm("vpshufb %2, %1, %0" : "=x"(found[i]) : "x"(planes[2 + i]), "x"(codes));
  asm("vpunpcklbw %2, %1, %0" : "=x"(pairs[0]) : "x"(found[0]), "x"(found[1]));
  asm("vpunpckhbw %2, %1, %0" : "=x"(pairs[1]) : "x"(found[0]), "x"(found[1]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    to[2 * i] = (Vec)(pairs[i] << 16);
    to[2 * i + 1] = (Vec)(pairs[i] & 0xffff0000u);
  }
}

// 64 floats, halved.
static inline void halve(const float* from, float* to) {
  for (int odd = 0; odd < 2; ++odd)
    for (int i = 0; i < 2; ++i) {
      Vec half[2];
      for (int h = 0; h < 2; ++h) {
        const float* const columns = from + 32 * h + 16 * i;
        half[h] = pick(load(columns), load(columns + kWidth), 2 * lanes() + odd);
      }
      for (int j = 0; j < 2; ++j) store(to + (4 * odd + 2 * i + j) * kWidth, pick(half[0], half[1], 2 * lanes() + j));
    }
}

// And back.
static inline void unhalve(const Vec* from, float* to) {
  const IntVec place = lanes() / 2 + (lanes() & 1) * kWidth;
  for (int i = 0; i < 2; ++i) {
    Vec half[2][2];  // [odd][of the columns]
    for (int odd = 0; odd < 2; ++odd)
      for (int h = 0; h < 2; ++h)
        half[odd][h] = pick(from[4 * odd + 2 * i], from[4 * odd + 2 * i + 1], place + h * (kWidth / 2));
    for (int h = 0; h < 2; ++h)
      for (int j = 0; j < 2; ++j)
        store(to + 32 * h + 16 * i + 8 * j, pick(half[0][h], half[1][h], place + j * (kWidth / 2)));
  }
}
#endif

// Codes of four bits.
template <Levels kLevels>
struct FourOf {
  static constexpr int kVecs = 2;
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr int kMostVecs = 4;
  static constexpr int kHalved = kLevels == Levels::kBfloat16 ? 64 : 0;
#else
  static constexpr int kMostVecs = 2;
  static constexpr int kHalved = 0;
#endif
  static constexpr int kChunk = 2 * kWidth;
  static inline int64_t byte(int64_t column) { return column >> 1; }
  struct Table {
    const float* levels;
#if defined(__AVX512F__)
    Vec all;
    explicit Table(const Codes& w) : levels(w.levels), all(load(w.levels)) {}
#elif defined(__AVX2__)
    Vec low, high;
    ByteVec planes[4];
    explicit Table(const Codes& w) : levels(w.levels), low(load(w.levels)), high(load(w.levels + 8)) {
      for (int l = 0; l < 32; ++l) {
        const float level = levels[l % 16] + (kLevels == Levels::kWhole ? kWholeZero : 0);
        uint8_t bytes[4];
        __builtin_memcpy(bytes, &level, sizeof bytes);
        for (int i = 0; i < 4; ++i) planes[i][l] = bytes[i];
      }
    }
#else
    explicit Table(const Codes& w) : levels(w.levels) {}
#endif
  };
  template <int V>
  static inline __attribute__((always_inline)) void read(const uint8_t* p, const Table& t, Vec* to) {
    static_assert(V == kVecs || V == kMostVecs, "codes are read by chunks, or by as many as are looked up at once");
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (V == 4) return look_up<kLevels>(p, t.planes, to);
#endif
#if defined(__AVX512F__)
    // The permutation looks at the lowest four bits of each lane.
    const WordVec both = widen(p), upper = both >> 4;
    asm("vpermps %2, %1, %0" : "=v"(to[0]) : "v"(both), "v"(t.all));
    asm("vpermps %2, %1, %0" : "=v"(to[1]) : "v"(upper), "v"(t.all));
#elif defined(__AVX2__)
    const WordVec both = widen(p);
    const WordVec index[2] = {both, both >> 4}, choice[2] = {both << 28, both << 24};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Vec low, high;
      asm("vpermps %2, %1, %0" : "=v"(low) : "v"(index[i]), "v"(t.low));
      asm("vpermps %2, %1, %0" : "=v"(high) : "v"(index[i]), "v"(t.high));
      asm("vblendvps %3, %2, %1, %0" : "=v"(to[i]) : "v"(low), "v"(high), "v"(choice[i]));
    }
#else
    to[0] = (Vec){t.levels[p[0] & 15], t.levels[p[1] & 15], t.levels[p[2] & 15], t.levels[p[3] & 15]};
    to[1] = (Vec){t.levels[p[0] >> 4], t.levels[p[1] >> 4], t.levels[p[2] >> 4], t.levels[p[3] >> 4]};
#endif
  }
  // The even ones of kHalved columns, or the odd ones.
  static inline __attribute__((always_inline)) void read_halved(const uint8_t* p, bool odd, const Table& t, Vec* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    look_up_halved(p, odd, t.planes, to);
#endif
  }
  static inline void halve(const float* from, float* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    CAPIBARA_ISA::halve(from, to);
#endif
  }
  static inline void unhalve(const Vec* from, float* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    CAPIBARA_ISA::unhalve(from, to);
#endif
  }
  static inline float level(const Codes& w, const uint8_t* row, int64_t column) {
    return w.levels[column % 2 == 0 ? row[column / 2] & 15 : row[column / 2] >> 4];
  }
};

using Four = FourOf<Levels::kAny>;
using Bfloat16Four = FourOf<Levels::kBfloat16>;
using WholeFour = FourOf<Levels::kWhole>;

// Which levels these are, where it is of use to know more.
static inline Levels levels_of(const Codes& w) {
  if (Four::kMostVecs == Four::kVecs) return Levels::kAny;
  bool bfloat16 = true, whole = true;
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, w.levels + i, sizeof bits);
    bfloat16 &= bits << 16 == 0;
    whole &= w.levels[i] >= -32768 && w.levels[i] <= 32767 && w.levels[i] == float(int32_t(w.levels[i]));
  }
  return bfloat16 ? Levels::kBfloat16 : whole ? Levels::kWhole : Levels::kAny;
}

// Scales of a row, by group.
struct Scales {
  const float* plain;
  const uint8_t* codes;
  const float* table;
  Scales(const Codes& w, int64_t row)
      : plain(w.scales == nullptr ? nullptr : w.scales + row * w.groups),
        codes(w.scales == nullptr ? w.scale_codes + row * w.groups : nullptr),
        table(w.table) {}
  inline float operator[](int64_t g) const { return plain != nullptr ? plain[g] : table[codes[g]]; }
};

// The scales of a chunk whose columns belong to more than one group.
template <typename C>
static inline void spread(const Codes& w, const Scales& scales, int64_t column, Vec* to) {
  constexpr int kChunk = C::kChunk;
  if (kChunk % w.group == 0 && kChunk / w.group == 2) {
    const Vec first = splat(scales[column / w.group]), second = splat(scales[column / w.group + 1]);
    if (C::kVecs == 1 || w.group % 2 == 0) {
#pragma GCC unroll 2
      for (int v = 0; v < C::kVecs; ++v) to[v] = lanes() < kWidth / 2 ? first : second;
      return;
    }
  }
  float each[kChunk];
  int64_t g = column / w.group, left = (g + 1) * w.group - column;
  float scale = scales[g];
  for (int i = 0; i < kChunk; ++i, --left) {
    if (left == 0) scale = scales[++g], left = w.group;
    each[C::kVecs == 1 ? i : i / 2 + i % 2 * kWidth] = scale;
  }
  for (int v = 0; v < C::kVecs; ++v) to[v] = load(each + v * kWidth);
}

// Calls put(column, vectors) for the levels of each whole chunk of a row from column `begin` to `end`, `begin` where a
// chunk begins, and last(column, level) for each level after the row's last whole chunk.
template <typename C, class Put, class Last>
static inline __attribute__((always_inline)) void levels(const Codes& w, const typename C::Table& table, int64_t row,
                                                         int64_t begin, int64_t end, Put put, Last last) {
  const uint8_t* const codes = w.codes + row * w.width;
  const int64_t whole = end - (end - begin) % C::kChunk;
  int64_t k = begin;
  for (; k + C::kMostVecs * kWidth <= whole; k += C::kMostVecs * kWidth) {
    Vec values[C::kMostVecs];
    C::template read<C::kMostVecs>(codes + C::byte(k), table, values);
#pragma GCC unroll 4
    for (int v = 0; v < C::kMostVecs; v += C::kVecs) put(k + v * kWidth, values + v);
  }
  for (; k < whole; k += C::kChunk) {
    Vec values[C::kVecs];
    C::template read<C::kVecs>(codes + C::byte(k), table, values);
    put(k, values);
  }
  for (; k < end; ++k) last(k, C::level(w, codes, k));
}

// Calls put(column, vectors) for the numbers of each whole chunk of a row from column `begin` to `end`, `begin` where a
// chunk begins, and last(column, number) for each number after the row's last whole chunk.
template <typename C, class Put, class Last>
static inline __attribute__((always_inline)) void numbers(const Codes& w, const typename C::Table& table, int64_t row,
                                                          int64_t begin, int64_t end, Put put, Last last) {
  const uint8_t* const codes = w.codes + row * w.width;
  const Scales scales(w, row);
  const int64_t whole = end - (end - begin) % C::kChunk;
  if (w.group % C::kChunk == 0) {
    for (int64_t k = begin; k < whole;) {
      const int64_t g = k / w.group, stop = least((g + 1) * w.group, whole);
      const Vec scale = splat(scales[g]);
      constexpr int kMost = C::kMostVecs;
      for (; k + kMost * kWidth <= stop; k += kMost * kWidth) {
        Vec values[kMost];
        C::template read<kMost>(codes + C::byte(k), table, values);
#pragma GCC unroll 4
        for (int v = 0; v < kMost; ++v) values[v] *= scale;
#pragma GCC unroll 4
        for (int v = 0; v < kMost; v += C::kVecs) put(k + v * kWidth, values + v);
      }
      for (; k < stop; k += C::kChunk) {
        Vec values[C::kVecs];
        C::template read<C::kVecs>(codes + C::byte(k), table, values);
#pragma GCC unroll 2
        for (int v = 0; v < C::kVecs; ++v) values[v] *= scale;
        put(k, values);
      }
    }
  } else {
    for (int64_t k = begin; k < whole; k += C::kChunk) {
      Vec values[C::kVecs], scale[C::kVecs];
      C::template read<C::kVecs>(codes + C::byte(k), table, values);
      spread<C>(w, scales, k, scale);
#pragma GCC unroll 2
      for (int v = 0; v < C::kVecs; ++v) values[v] *= scale[v];
      put(k, values);
    }
  }
  for (int64_t k = whole; k < end; ++k) last(k, C::level(w, codes, k) * scales[k / w.group]);
}

}  // namespace CAPIBARA_ISA
