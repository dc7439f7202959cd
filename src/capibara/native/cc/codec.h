// Entropy coding and the cutting of numbers into symbols and the rest: what the lossless codec does most of its time.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace capibara {

constexpr int kLanes = 32;          // states of a block
constexpr int kScaleBits = 12;      // frequencies add up to 4096
constexpr uint32_t kLowest = 1u << 16;
constexpr int64_t kBlock = 1 << 18;  // symbols that share a set of states
constexpr int64_t kStrip = 2048;     // numbers at a time, so that what is between two loops stays in the cache
// From so many bytes on, numbers go past the caches: the first ones would not be there any more when the last ones are.
constexpr int64_t kPastCaches = 16 << 20;

// Rows of numbers and where each is cut; see codecs/lossless.py for the meaning of the fields.
struct Cut {
  const void* rows;     // [count, length], of `width` bytes
  int64_t length;
  int32_t width;        // 1, 2, 4 or 8 bytes
  int32_t shift;        // lowest bits that belong to the rest
  int32_t symbol_bits;
  int32_t sign;         // the topmost bit belongs to the rest, too
  int32_t drop;         // lowest bits that are left out
  int32_t alternating;  // numbers are 0, -1, 1, -2, 2 ...
  uint64_t base;        // added to what the bits say
};

// What the encoder needs of a symbol's entry.
struct Part {
  uint64_t reciprocal;  // 2^44 / frequency, rounded up: exact for every state that is divided
  uint32_t last;        // the largest state that takes the symbol without giving up a word
  uint32_t bias;        // 4096 - frequency
  uint32_t start;
};

// A block as it lies in a payload: any address.
struct Block {
  const uint8_t* states;  // [32] of 32 bits
  const uint8_t* words;   // [count] of 16 bits
  int64_t count;
};

// Chosen rows of a tensor that share a table, and where their coded parts lie.
struct Group {
  const int64_t* chosen;
  int64_t rows;
  const uint64_t* values;   // of each entry; 0 from `escape` on
  int escape;
  const uint32_t* table;    // place -> symbol << 24 | frequency modulo 4096 << 12 | place within its part
  const uint8_t* planes;
  const Block* blocks;
  const uint16_t* escaped;
  int64_t escapes;
  int32_t drop;  // lowest bits that are left out
};

enum Outcome { kFine = 0, kUneven = 1, kEscapes = 2 };

struct CodecKernels {
  // For each row: the sum of (symbols >> coarse), and all its numbers or-ed together.
  void (*measure)(const Cut& cut, int64_t count, int coarse, int64_t* sums, uint64_t* ors);
  // Adds how often each symbol occurs in chosen rows. `scratch` holds 4 << symbol_bits zeros, and does again afterwards.
  void (*histogram)(const Cut& cut, const int64_t* chosen, int64_t count, uint32_t* scratch, int64_t* counts);
  // Numbers `begin` (a multiple of kStrip) to begin + size of chosen rows, counted within these: their symbols by
  // `entry`, and the rest in planes for `total` numbers; returns how many symbols had entry `escape`, and puts those
  // (as they are) into `escaped`, unless that is null, as it is where there are none.
  int64_t (*split)(const Cut& cut, const int64_t* chosen, int64_t begin, int64_t size, int64_t total,
                   const uint8_t* entry, int escape, uint8_t* symbols, uint8_t* planes, uint16_t* escaped);
  // Returns the number of words, which are written downwards from words_end; one more is written to than are used.
  int64_t (*encode)(const uint8_t* symbols, int64_t count, const Part* parts, uint32_t* states, uint16_t* words_end);
  // Decodes groups into their rows of `out`, two at a time; `cut.drop` is not looked at. `past`: numbers may go past the
  // caches, which saves reading their lines before they are written.
  Outcome (*restore)(const Cut& cut, void* out, const Group* groups, int count, bool past);
  // Goes on with a CRC-32 (of zlib's polynomial); `size` is a multiple of 16 and at least 64. Null where that would be
  // no quicker.
  uint32_t (*crc32)(uint32_t crc, const uint8_t* data, int64_t size);
};

// The kind of numbers, as in formats.py.
struct Form {
  int32_t bits, exponent, mantissa, is_signed;
};

// A payload's part behind its first byte. Returns its size, -1 if it would have `capacity` bytes or more, -2 without
// memory.
int64_t encode_tensor(const Form& form, const void* bits, int64_t rows, int64_t length, int threads, uint8_t* out,
                      int64_t capacity);
// The reverse. Returns 0, what is wrong with the payload (an index into the texts in native.py), or -2 without memory.
// `past`: as for the kernel that restores.
int decode_tensor(const Form& form, const uint8_t* data, int64_t size, int64_t rows, int64_t length, int threads,
                  void* out, bool past);

// One of several payloads; laid out as in native.py.
struct Payload {
  Form form;
  const uint8_t* data;  // with its first byte, which says how it is coded
  int64_t size;
  int64_t rows, length;
  void* out;
  uint32_t crc32;
  int32_t outcome;  // as of decode_tensor, or one of these
};
constexpr int kOtherChecksum = -3, kOtherKind = -4;

// Whether checksums have a kernel that this machine can run.
bool has_crc32();

// Compares checksums and decodes, one payload on each thread at a time. False, with nothing done, where checksums have no
// kernel.
bool decode_many(Payload* payloads, int64_t count, int threads);

}  // namespace capibara
