// What the encoder decides: where numbers are cut, which rows share a table, which symbols get an entry. As in
// codecs/choice.py: every choice is made with integers, or with single divisions of float64, which are exact to the
// last bit everywhere; codec_choice.cc is compiled without anything that would change that.
#pragma once

#include "codec_parts.h"

namespace capibara {

constexpr int kClasses = 8;

// How often symbols occur, for each class; only of those that do somewhere, which are few of all that there could be.
struct Counts {
  std::vector<int64_t> symbols;
  std::vector<std::vector<int64_t>> rows;
};

Counts gather(const std::vector<std::vector<int64_t>>& all);

// Where numbers may be cut, with the most bits in the symbol last. Integers become others, in `shifted`.
std::vector<Cut> make_cuts(const Form& form, const void* bits, int64_t rows, int64_t length,
                           std::vector<uint8_t>& shifted);

// The cut and the number of classes that take the fewest bits, of counts by the last cut.
Cut choose(const std::vector<Cut>& cuts, const Counts& finest, int64_t rows, int64_t length, int64_t& classes);

// Neighbouring classes taken together, and symbols that differ in their last `bits` only.
Counts merge(const Counts& counts, size_t classes, int bits);

Table make_table(const std::vector<int64_t>& counts);

// How many low bits are worth leaving out, and the rows in which they are all zero.
int zero_bits(const std::vector<uint64_t>& ors, const Cut& cut, std::vector<uint8_t>& dropping);

}  // namespace capibara
