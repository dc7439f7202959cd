// Symbols and the rest put together to numbers. Compiled once per instruction set.
#pragma once

#include <new>

#include "codec_lanes.h"
#include "codec_split.h"

namespace CAPIBARA_ISA {

using capibara::kBlock;

template <typename T>
struct Joiner {
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


  // Where the entries' symbols leave some out: most tables do so once or twice, if at all.
  struct Gaps {
    int count = 0;
    T first = 0, at[2] = {}, step[2] = {};
    T table[256];

    Gaps(const Cut& cut, const capibara::Group& group) {
      for (int i = 0; i <= group.escape; ++i) table[i] = T(group.values[i] << cut.shift);
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

  // Where the numbers of a strip go: rows of `length`, the first of which has `within` already.
  struct Target {
    T* x;
    const int64_t* rows;
    int64_t length, within;
    bool past;  // the caches

    T* number(int64_t i) const { return x + rows[(within + i) / length] * length + (within + i) % length; }

    // Calls `put(to, i, run)` for each run of numbers of one row, of which the first is number `i` of the strip.
    template <typename Put>
    void runs(int64_t size, const Put& put) const {
      const int64_t* row = rows;
      int64_t at = within;
      for (int64_t i = 0; i < size; at = 0, ++row) {
        const int64_t run = length - at < size - i ? length - at : size - i;
        put(x + *row * length + at, i, run);
        i += run;
      }
    }
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
    Left<T> up, put, put_sign;
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

  // Numbers `begin` to `end` of a strip, which lie one after another from `to` on. The bits above the rest are found by
  // arithmetic where that is possible: unlike looking up, vectors do it.
  template <int N, int whole, bool others>
  static void place_run(const Join& join, const Gaps& gaps, T* __restrict to, const uint8_t* __restrict code,
                        const Fields& from, int64_t begin, int64_t end) {
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
    if (with.sign)
      for (int64_t j = begin; j < end; ++j) to[j - begin] = with.with_sign(above(j), field<whole, others>(f, j));
    else if (whole != kNoWhole && whole != kAny)
      return;  // what has no sign does not come this way
    else if (with.alternating)
      for (int64_t j = begin; j < end; ++j) to[j - begin] = with.folded(above(j), field<whole, others>(f, j));
    else
      for (int64_t j = begin; j < end; ++j) to[j - begin] = with.shifted(above(j), field<whole, others>(f, j));
  }

#if defined(__AVX2__)
  // As below, for 16 or 8 numbers with a sign at a time.
  template <int N, int whole, bool others>
  static void place_many(const Join& join, const Gaps& gaps, const Target& target, const uint8_t* __restrict code,
                         const Fields& from, int64_t size) {
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
    target.runs(size, [&](T* to, int64_t i, int64_t run) {
      const bool past = target.past && reinterpret_cast<uintptr_t>(to) % sizeof(__m256i) == 0;
      int64_t j = i;
      for (; j + step <= i + run; j += step) {
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
        __m256i* const at = reinterpret_cast<__m256i*>(to + (j - i));
        if (past)
          _mm256_stream_si256(at, v);
        else
          _mm256_storeu_si256(at, v);
      }
      if (j < i + run) place_run<N, whole, others>(join, gaps, to + (j - i), code, f, j, i + run);
    });
  }
#endif

  // All numbers of a strip.
  template <int N, int whole, bool others>
  static void place(const Join& join, const Gaps& gaps, const Target& target, const uint8_t* code, const Fields& from,
                    int64_t size) {
#if defined(__AVX2__)
    if constexpr (sizeof(T) == 2 || sizeof(T) == 4)
      if (N <= 2 && join.sign && whole != kAny)
        return place_many<N, whole, others>(join, gaps, target, code, from, size);
#endif
    target.runs(size, [&](T* to, int64_t i, int64_t run) {
      place_run<N, whole, others>(join, gaps, to, code, from, i, i + run);
    });
  }

  using Place = void (*)(const Join&, const Gaps&, const Target&, const uint8_t*, const Fields&, int64_t);

  template <int whole, bool others>
  static Place by_gaps(int gaps) {
    return gaps == 0 ? place<0, whole, others> : gaps <= 2 ? place<2, whole, others> : place<3, whole, others>;
  }

  // A group that is being decoded, strip by strip.
  struct Stream {
    const capibara::Group& group;
    const int64_t length, total;
    const Gaps gaps;
    const Join join;
    const int width, whole, whole_bits;
    const bool others, past;
    Place put;
    int64_t begin = 0, row = 0, within = 0;  // the number that is next, and where it goes
    int64_t found = 0;                       // escapes
    Lanes lanes;
    uint8_t code[kStrip];

    Stream(const Cut& cut, const capibara::Group& of, bool past_caches)
        : group(of),
          length(cut.length),
          total(of.rows * cut.length),
          gaps(cut, of),
          join(cut),
          width(cut.shift - cut.drop + cut.sign),
          // Floats have their whole bytes in one plane or two, which are read where they lie.
          whole(width < 8                                                ? kNoWhole
                : cut.sign && width == 8                                 ? kByte
                : cut.sign && sizeof(T) > 2 && width == 24               ? kHalfAndByte
                : cut.sign && sizeof(T) > 2 && width >= 16 && width < 24 ? kHalf
                                                                         : kAny),
          whole_bits(whole == kByte ? 8 : whole == kHalf ? 16 : whole == kHalfAndByte ? 24 : 0),
          others(width % 8 != 0),
          past(past_caches) {
      put = others ? by_gaps<kAny, true>(gaps.count) : by_gaps<kAny, false>(gaps.count);
      if (whole == kNoWhole)
        put = others ? by_gaps<kNoWhole, true>(gaps.count) : by_gaps<kNoWhole, false>(gaps.count);
      if (whole == kByte) put = by_gaps<kByte, false>(gaps.count);
      if constexpr (sizeof(T) > 2) {
        if (whole == kHalf) put = others ? by_gaps<kHalf, true>(gaps.count) : by_gaps<kHalf, false>(gaps.count);
        if (whole == kHalfAndByte) put = by_gaps<kHalfAndByte, false>(gaps.count);
      }
    }

    bool done() const { return begin == total; }

    // How many numbers the next strip has; its block is opened if it is the first one there.
    int64_t next() {
      if (begin % kBlock == 0) lanes.open(group.blocks[begin / kBlock], group.table);
      return total - begin < kStrip ? total - begin : kStrip;
    }

    // Puts the `size` numbers, whose symbols are in `code`, where they belong.
    capibara::Outcome place_strip(T* x, int64_t size) {
      const bool ends = begin + size == total || (begin + size) % kBlock == 0;
      if (ends && !lanes.even()) return capibara::kUneven;
      T rest[kStrip];
      uint8_t low[kStrip];
      if (whole == kAny)
        unpack(rest, low, begin, size, width, total, group.planes);
      else if (others)
        unpack_low(low, begin, size, width - whole_bits, total, group.planes + total * (whole_bits / 8));
      const Target target{x, group.chosen + row, length, within, past};
      const Fields fields{group.planes + 2 * begin, group.planes + (whole == kHalfAndByte ? 2 * total : 0) + begin, low,
                          rest, width - 16};
      put(join, gaps, target, code, fields, size);
      if (group.escapes && !place_escaped(target, fields, size)) return capibara::kEscapes;
      row += (within + size) / length;
      within = (within + size) % length;
      begin += size;
      return done() && found != group.escapes ? capibara::kEscapes : capibara::kFine;
    }

    bool place_escaped(const Target& target, const Fields& fields, int64_t size) {
      const uint8_t *at = code, *end = at + size;
      while (at < end && (at = static_cast<const uint8_t*>(memchr(at, group.escape, size_t(end - at))))) {
        if (found == group.escapes) return false;
        const int64_t j = at++ - code;
        const T r = whole == kByte          ? field<kByte, false>(fields, j)
                    : whole == kHalf        ? T(field<kHalf, false>(fields, j) | (others ? fields.low[j] : T(0)))
                    : whole == kHalfAndByte ? field<kHalfAndByte, false>(fields, j)
                    : T((whole == kAny ? fields.rest[j] : T(0)) | (others ? fields.low[j] : T(0)));
        *target.number(j) = join(T(T(group.escaped[found++]) << join.up.by), r);
      }
      return true;
    }
  };

  static capibara::Outcome one_strip(Stream& a, T* x) {
    const int64_t size = a.next();
    return a.lanes.decode(a.code, size) ? a.place_strip(x, size) : capibara::kUneven;
  }

  static capibara::Outcome two_strips(Stream& a, Stream& b, T* x) {
    const int64_t size = a.next(), other = b.next();
    if (!Lanes::decode_two(a.lanes, a.code, size, b.lanes, b.code, other)) return capibara::kUneven;
    const capibara::Outcome outcome = a.place_strip(x, size);
    return outcome == capibara::kFine ? b.place_strip(x, other) : outcome;
  }

  // Two groups at a time; where one ends, the next one takes its place.
  static capibara::Outcome restore(Cut cut, void* out, const capibara::Group* groups, int count, bool past) {
    const capibara::Outcome outcome = restore_all(cut, out, groups, count, past);
#if defined(__AVX2__)
    // What went past the caches is there before what this thread says of it.
    if (past) _mm_sfence();
#endif
    return outcome;
  }

  static capibara::Outcome restore_all(Cut cut, void* out, const capibara::Group* groups, int count, bool past) {
    T* const x = static_cast<T*>(out);
    const auto open = [&](Stream* at, const capibara::Group& group) {
      cut.drop = group.drop;
      return new (at) Stream(cut, group, past);
    };
    alignas(Stream) char rooms[2][sizeof(Stream)];
    Stream* live[2] = {reinterpret_cast<Stream*>(rooms[0]), reinterpret_cast<Stream*>(rooms[1])};
    int running = 0, next = 0;
    while (true) {
      while (running < 2 && next < count) open(live[running++], groups[next++]);
      if (running == 0) return capibara::kFine;
      const capibara::Outcome outcome = running == 2 ? two_strips(*live[0], *live[1], x) : one_strip(*live[0], x);
      if (outcome != capibara::kFine) return outcome;
      if (running == 2 && live[1]->done()) --running;
      if (live[0]->done()) {
        Stream* const last = live[0];
        live[0] = live[1];
        live[1] = last;
        --running;
      }
    }
  }
};

}  // namespace CAPIBARA_ISA
