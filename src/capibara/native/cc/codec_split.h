// Numbers cut into symbols and the rest. Compiled once per instruction set.
#pragma once

#include <string.h>

#include "codec.h"
#include "codec_pack.h"

namespace CAPIBARA_ISA {

using capibara::Cut;
using capibara::kStrip;

// Shifts what is narrower than an int by a width that is known at run time. A product of sixteen bits is one
// instruction, while for a shift compilers widen the numbers first.
template <typename T>
struct Left {
  int by;
  T factor;
  explicit Left(int width) : by(width), factor(T(T(1) << width)) {}
  T operator()(T v) const { return sizeof(T) == 2 ? T(v * factor) : T(v << by); }
};

template <typename T>
struct Numbers {
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
    const Left<T> put_sign(up);
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
};

}  // namespace CAPIBARA_ISA
