// Transposes matrices in memory. Called through ctypes.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// A square of so many bytes each way stays in the first cache while it is read by rows and written by columns.
constexpr int64_t kSide = 64;

struct Matrices {
  const void* from;
  int64_t count, rows, columns;
  void* to;
};

// Strips of columns, counted through all matrices.
template <typename T>
void transpose(const Matrices& m, int64_t first, int64_t last) {
  constexpr int64_t side = kSide / sizeof(T);
  const int64_t strips = (m.columns + side - 1) / side, size = m.rows * m.columns;
  for (int64_t strip = first; strip < last; ++strip) {
    const T* __restrict from = static_cast<const T*>(m.from) + strip / strips * size;
    T* __restrict to = static_cast<T*>(m.to) + strip / strips * size;
    const int64_t begin = strip % strips * side, end = std::min(begin + side, m.columns);
    for (int64_t k = 0; k < m.rows; k += side) {
      const int64_t stop = std::min(k + side, m.rows);
      for (int64_t j = begin; j < end; ++j)
        for (int64_t i = k; i < stop; ++i) to[j * m.rows + i] = from[i * m.columns + j];
    }
  }
}

template <typename T>
void transpose_all(const Matrices& m, int64_t threads) {
  constexpr int64_t side = kSide / sizeof(T);
  const int64_t strips = m.count * ((m.columns + side - 1) / side), share = (strips + threads - 1) / threads;
  std::vector<std::thread> others;
  others.reserve(threads);
  int64_t first = share;
  try {
    for (; first < strips; first += share)
      others.emplace_back(transpose<T>, m, first, std::min(first + share, strips));
  } catch (...) {  // the system gives no more threads
    transpose<T>(m, first, strips);
  }
  transpose<T>(m, 0, std::min(share, strips));
  for (std::thread& other : others) other.join();
}

}  // namespace

// Matrices [count, rows, columns] of items of 2, 4 or 8 bytes become [count, columns, rows].
CAPIBARA_EXPORT void capibara_transposed(const void* from, int64_t count, int64_t rows, int64_t columns, int64_t bytes,
                                         int64_t threads, void* to) {
  const auto run = bytes == 2 ? transpose_all<uint16_t> : bytes == 4 ? transpose_all<uint32_t> : transpose_all<uint64_t>;
  run({from, count, rows, columns, to}, std::max<int64_t>(threads, 1));
}
