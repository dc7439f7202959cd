// Bits of a payload's header, lowest first; the same as entropy/bits.py.
#pragma once

#include <stdint.h>

#include <vector>

namespace capibara {

class BitWriter {
 public:
  void write(uint64_t value, int width) {
    for (int i = 0; i < width; ++i) {
      if (used_ % 8 == 0) done_.push_back(0);
      done_.back() = uint8_t(done_.back() | (value >> i & 1) << used_ % 8);
      ++used_;
    }
  }
  // Any number in about twice as many bits as it has (Elias's gamma code).
  void write_gamma(uint64_t value) {
    const int width = 64 - __builtin_clzll(value + 1);
    write(uint64_t(1) << (width - 1), width);
    write((value + 1) & ((uint64_t(1) << (width - 1)) - 1), width - 1);
  }
  const std::vector<uint8_t>& done() const { return done_; }

 private:
  std::vector<uint8_t> done_;
  int64_t used_ = 0;
};

// Once something does not fit, every further read gives 0 and `good` stays false.
class BitReader {
 public:
  BitReader(const uint8_t* data, int64_t size) : data_(data), left_(size * 8) {}
  bool good = true;

  uint64_t read(int width) {
    if (width > left_) good = false;
    if (!good) return 0;
    uint64_t value = 0;
    for (int i = 0; i < width; ++i, ++at_) value |= uint64_t(data_[at_ >> 3] >> (at_ & 7) & 1) << i;
    left_ -= width;
    return value;
  }
  uint64_t read_gamma() {
    int zeros = 0;
    while (good && read(1) == 0)
      if (++zeros > 48) good = false;
    return good ? ((uint64_t(1) << zeros) | read(zeros)) - 1 : 0;
  }
  // Nothing but zeros that fill the last byte may be left.
  bool finished() { return good && left_ < 8 && read(int(left_)) == 0; }

 private:
  const uint8_t* data_;
  int64_t at_ = 0, left_;
};

}  // namespace capibara
