// What coding and decoding of a whole tensor have in common.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "codec.h"
#include "isa.h"

namespace capibara {

constexpr int64_t kScale = 1 << kScaleBits;

// Symbols that have an entry, and how often they come.
struct Table {
  int drop = 0;
  std::vector<int64_t> symbols, frequencies;  // the last frequency is the escape's
  int64_t escapes = 0;
};

inline const CodecKernels& kernels() { return *isa().codec; }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int bit_length(uint64_t n) { return n ? 64 - __builtin_clzll(n) : 0; }

// Sends a new thread to the other processors. After an idle moment Linux may begin it on the caller's, where it waits for
// the end of the caller's turn: 3 to 4 ms of 17 for a model of 45 MB. The thread has to be there still: of one that has
// ended the number is 0, which is the caller's own.
inline void send_away(std::thread& thread) {
#if defined(__linux__)
  cpu_set_t others;
  const int here = sched_getcpu();
  if (here < 0 || here >= CPU_SETSIZE || pthread_getaffinity_np(pthread_self(), sizeof others, &others) != 0) return;
  CPU_CLR(here, &others);
  if (CPU_COUNT(&others) > 0) pthread_setaffinity_np(thread.native_handle(), sizeof others, &others);
#else
  (void)thread;
#endif
}

// Runs work(i) for every i, on up to `threads` threads; without threads to be had, on this one.
template <typename Work>
void each(int threads, int64_t items, Work work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto take = [&] {
    try {
      for (int64_t i; (i = next.fetch_add(1)) < items;) work(i);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  std::atomic<bool> sent{false};
  const auto help = [&] {
    take();
    while (!sent.load(std::memory_order_acquire)) std::this_thread::yield();
  };
  std::vector<std::thread> crew;
  crew.reserve(size_t(std::max(threads, 1)));
  for (int64_t t = 1; t < std::min<int64_t>(threads, items); ++t) try {
      crew.emplace_back(help);
      send_away(crew.back());
    } catch (const std::exception&) {  // no thread to be had, or no memory for one: those that run do it all
      break;
    }
  sent.store(true, std::memory_order_release);
  take();
  for (auto& one : crew) one.join();
  if (out_of_memory) throw std::bad_alloc();
}

inline int64_t packed_size(int64_t count, int width) {
  int64_t bytes = 0;
  for (int size = 32; size; size /= 2)
    for (; width >= size; width -= size) bytes += (count * size + 7) / 8;
  return bytes;
}

// Fields of at most 16 bits, plane by plane; for what there are few of.
template <typename T>
void pack_few(const T* values, int64_t count, int width, uint8_t* out) {
  if (count == 0) return;
  for (int size = 32; size; size /= 2)
    while (width >= size) {
      width -= size;
      std::memset(out, 0, size_t((count * size + 7) / 8));
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t field = uint32_t(values[i] >> width) & ((1u << size) - 1);
        if (size < 8)
          out[i * size / 8] = uint8_t(out[i * size / 8] | field << i * size % 8);
        else
          for (int b = 0; b < size / 8; ++b) out[i * (size / 8) + b] = uint8_t(field >> 8 * b);
      }
      out += (count * size + 7) / 8;
    }
}

template <typename T>
void unpack_few(const uint8_t* data, int64_t count, int width, T* out) {
  std::fill(out, out + count, T(0));
  for (int size = 32; size; size /= 2)
    while (width >= size) {
      width -= size;
      for (int64_t i = 0; i < count; ++i) {
        uint32_t field = 0;
        if (size < 8)
          field = data[i * size / 8] >> i * size % 8 & ((1u << size) - 1);
        else
          for (int b = 0; b < size / 8; ++b) field |= uint32_t(data[i * (size / 8) + b]) << 8 * b;
        out[i] = T(out[i] | field << width);
      }
      data += (count * size + 7) / 8;
    }
}

}  // namespace capibara
