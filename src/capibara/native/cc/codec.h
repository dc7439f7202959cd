// Entropy coding and the cutting of numbers into symbols and the rest: what the lossless codec does most of its time.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace capibara {

constexpr int kLanes = 32;          // states of a block
constexpr int kScaleBits = 12;      // frequencies add up to 4096
constexpr uint32_t kLowest = 1u << 16;

// Rows of numbers and where each is cut; see codecs/lossless.py for the meaning of the fields.
struct Cut {
  const void* rows;     // [count, length], of `width` bytes
  int64_t length;
  int32_t width;        // 1, 2, 4 or 8 bytes
  int32_t shift;        // lowest bits that belong to the rest
  int32_t symbol_bits;
  int32_t sign;         // the topmost bit belongs to the rest, too
  int32_t drop;         // lowest bits that are left out
};

struct CodecKernels {
  // For each row: the sum of (symbols >> coarse), and all its numbers or-ed together.
  void (*measure)(const Cut& cut, int64_t count, int coarse, int64_t* sums, uint64_t* ors);
  // Adds to histogram[kind[row]][symbol].
  void (*histogram)(const Cut& cut, int64_t count, const uint8_t* kind, int64_t* histogram);
  // Chosen rows: their symbols by `entry`, and the rest in planes; returns how many symbols had entry `escape`, and
  // appends those (as they are) to `escaped`.
  int64_t (*split)(const Cut& cut, const int64_t* chosen, int64_t count, const uint8_t* entry, int escape,
                   uint8_t* symbols, uint8_t* planes, uint16_t* escaped);
  // The reverse, into chosen rows. Returns how many escapes there were, or -1 if more than `escapes`.
  int64_t (*join)(const Cut& cut, void* rows, const int64_t* chosen, int64_t count, const uint64_t* values,
                  int escape, const uint8_t* symbols, const uint8_t* planes, const uint16_t* escaped, int64_t escapes,
                  uint64_t base);
  // Returns the number of words, or -1 for a symbol of frequency 0. Words are written downwards from words_end.
  int64_t (*encode)(const uint8_t* symbols, int64_t count, const uint16_t* frequency, const uint16_t* start,
                    uint32_t* states, uint16_t* words_end);
  // table[place] = symbol | frequency - 1 << 8 | place within its part << 20. Returns 0 when all came out even.
  int (*decode)(const uint32_t* states, const uint16_t* words, int64_t count_words, const uint32_t* table,
                uint8_t* symbols, int64_t count);
};

}  // namespace capibara
