// Puts matrices from files or memory where they are wanted: as they lie, transposed, or in panels. Called through
// ctypes.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include <unistd.h>

#include "panels.h"

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kBlock = 1 << 18;  // bytes that stay in the second cache between reading and writing
constexpr int64_t kRun = 1 << 22;    // bytes that are read at once where nothing changes its order

enum Layout : int64_t { kSame, kTransposed, kPanels, kTurnedPanels };

struct Part {
  int64_t descriptor;  // of a file; -1: memory
  int64_t from;        // where the matrices begin in it: an offset, or an address
  int64_t count, rows, columns, bytes, layout;
  int64_t to;  // an address
};

// Of a part: rows that are put together, and how many times in each matrix.
struct Strips {
  int64_t rows, each;
};

Strips strips_of(const Part& part) {
  const int64_t row = part.columns * part.bytes;
  int64_t rows = std::max<int64_t>((part.layout == kSame ? kRun : kBlock) / std::max<int64_t>(row, 1), 1);
  // Whole lines are written, and whole panels.
  const int64_t across = part.layout == kTurnedPanels ? capibara::kPanelColumns : kLine / part.bytes;
  if (part.layout != kSame) rows = std::max(rows / across, int64_t{1}) * across;
  return {rows, (part.rows + rows - 1) / rows};
}

bool read_all(int descriptor, char* to, int64_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t got = pread(descriptor, to, static_cast<size_t>(size), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got, size -= got, offset += got;
  }
  return true;
}

// Rows from [columns]-wide rows on become the columns of [columns, all].
template <typename T>
void transpose(const T* __restrict from, int64_t rows, int64_t columns, int64_t all, T* __restrict to) {
  constexpr int64_t side = kLine / sizeof(T);
  for (int64_t i = 0; i < rows; i += side) {
    const int64_t stop = std::min(i + side, rows);
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t k = i; k < stop; ++k) to[j * all + k] = from[k * columns + j];
  }
}

template <typename T>
void put(const Part& part, const T* from, int64_t matrix, int64_t first, int64_t rows) {
  T* const to = reinterpret_cast<T*>(part.to) + matrix * part.rows * part.columns;
  constexpr int64_t across = capibara::kPanelColumns;
  if (part.layout == kTransposed)
    transpose(from, rows, part.columns, part.rows, to + first);
  else if (part.layout == kTurnedPanels)
    capibara::turned_panels(from, part.columns, 0, rows / across, to + first * part.columns);
  else
    capibara::to_panels<sizeof(T)>(reinterpret_cast<const char*>(from), rows, part.rows, part.columns, 0,
                                   part.columns / across, reinterpret_cast<char*>(to + first * across));
}

// One thread's work; `scratch` grows to what it needs.
bool place(const Part& part, int64_t unit, std::vector<char>* scratch) {
  const Strips strips = strips_of(part);
  const int64_t matrix = unit / strips.each, first = unit % strips.each * strips.rows;
  const int64_t rows = std::min(strips.rows, part.rows - first), row = part.columns * part.bytes;
  const int64_t at = (matrix * part.rows + first) * row, size = rows * row;
  char* const to = reinterpret_cast<char*>(part.to);
  const bool in_memory = part.descriptor < 0;
  const char* from = reinterpret_cast<const char*>(part.from + at);
  if (part.layout == kSame) {
    if (in_memory) std::memcpy(to + at, from, size);
    return in_memory || read_all(static_cast<int>(part.descriptor), to + at, size, part.from + at);
  }
  if (!in_memory) {
    if (static_cast<int64_t>(scratch->size()) < size) scratch->resize(size);
    if (!read_all(static_cast<int>(part.descriptor), scratch->data(), size, part.from + at)) return false;
    from = scratch->data();
  }
  if (part.bytes == 2)
    put(part, reinterpret_cast<const uint16_t*>(from), matrix, first, rows);
  else if (part.bytes == 4)
    put(part, reinterpret_cast<const uint32_t*>(from), matrix, first, rows);
  else
    put(part, reinterpret_cast<const uint64_t*>(from), matrix, first, rows);
  return true;
}

}  // namespace

// Each part's matrices [count, rows, columns] of items of 1, 2, 4 or 8 bytes (in another order: of 2, 4 or 8; in panels:
// of 2 or 4) become [count, rows, columns], [count, columns, rows], [count, columns / 16, rows, 16], or, of matrices
// that are stored as [columns, inner], [count, rows / 16, columns, 16]. Gives the number of a part that could not be
// read, or -1. It begins at the unit `*next` and returns after some milliseconds: `*next` is then where it goes on, or
// -1 when all is done.
CAPIBARA_EXPORT int64_t capibara_placed(const void* parts, int64_t count, int64_t threads, int64_t milliseconds,
                                        int64_t* next_unit) {
  const Part* const all = static_cast<const Part*>(parts);
  std::vector<int64_t> ends;
  int64_t units = 0;
  for (int64_t i = 0; i < count; ++i) ends.push_back(units += all[i].count * strips_of(all[i]).each);
  std::atomic<int64_t> next{*next_unit}, failed{-1};
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  const auto work = [&] {
    std::vector<char> scratch;
    // Each looks at the time after a unit, so that some progress is made.
    for (int64_t unit; failed < 0 && (unit = next++) < units;) {
      const int64_t which = std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin();
      bool done = false;
      try {
        done = place(all[which], which == 0 ? unit : unit - ends[which - 1], &scratch);
      } catch (const std::bad_alloc&) {  // the caller reads it by itself, and says what is wrong
      }
      if (!done) failed = which;
      if (std::chrono::steady_clock::now() >= end) break;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min(threads, units - *next_unit); ++i) others.emplace_back(work);
  } catch (...) {  // the system gives no more threads
  }
  work();
  for (std::thread& other : others) other.join();
  *next_unit = next < units ? next.load() : -1;
  return failed;
}
