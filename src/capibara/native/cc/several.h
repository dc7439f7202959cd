// Several products that are computed together: their items are shared out as one sequence.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

namespace capibara {

// The items of several products, one product after the other. Items of a product come in blocks of `block` (0: there is
// nothing to finish); whoever does the last one of a block finishes it. So nobody is woken for that.
template <class Product>
class Several {
 public:
  // `products` must outlive this.
  Several(const std::vector<Product>& products, int64_t (*items)(const Product&), int64_t (*block)(const Product&))
      : products_(products) {
    int64_t blocks = 0;
    for (const Product& p : products) {
      const int64_t count = items(p), size = block(p);
      parts_.push_back({items_, size, blocks});
      items_ += count;
      blocks += size == 0 ? 0 : count / size;
    }
    left_ = std::vector<std::atomic<int64_t>>(blocks);
    for (size_t i = 0; i < products.size(); ++i) {
      const Part& part = parts_[i];
      const int64_t end = i + 1 < products.size() ? parts_[i + 1].blocks : blocks;
      for (int64_t b = part.blocks; b < end; ++b) left_[b].store(part.size);
    }
  }

  int64_t items() const { return items_; }

  template <class Multiply, class Finish>
  void run(int64_t item, float* scratch, Multiply multiply, Finish finish) {
    size_t i = parts_.size() - 1;
    while (parts_[i].first > item) --i;
    const Part& part = parts_[i];
    const int64_t own = item - part.first;
    multiply(products_[i], own, scratch);
    if (part.size == 0) return;
    const int64_t block = own / part.size;
    if (left_[part.blocks + block].fetch_sub(1, std::memory_order_acq_rel) == 1) finish(products_[i], block);
  }

 private:
  struct Part {
    int64_t first, size, blocks;  // of its items, of its blocks, and the number of its first block
  };
  const std::vector<Product>& products_;
  std::vector<Part> parts_;
  std::vector<std::atomic<int64_t>> left_;  // items of each block
  int64_t items_ = 0;
};

// Memory for several arrays of floats, each of which begins a line of the cache.
class Room {
 public:
  void add(float** place, int64_t floats) {
    places_.push_back({place, floats_});
    floats_ += (floats + 15) / 16 * 16;
  }

  // False when memory ran out.
  bool take() {
    if (floats_ == 0) return true;
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(floats_) * sizeof(float))));
    if (memory_ == nullptr) return false;
    for (const auto& [place, at] : places_) *place = memory_.get() + at;
    return true;
  }

 private:
  std::vector<std::pair<float**, int64_t>> places_;
  std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
  int64_t floats_ = 0;
};

}  // namespace capibara
