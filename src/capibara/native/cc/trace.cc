// Reads a trace of XLA's profiler (XSpace, tsl/profiler/protobuf/xplane.proto) into rows. The bytes are not trusted:
// every length is checked against what is left, and nothing is allocated by what they say.
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Row {
  int64_t start_ps;  // after the earliest line's timestamp
  int64_t duration_ps;
  int64_t program;  // -1: not said
  int64_t run;
  int64_t flow;  // on CPUs, of an operation and of the mark of its end; on GPUs, the scope it was started in; 0: none
  int32_t line;
  int32_t name;
  int32_t op;  // -1: not said
  int32_t device;
};
// The end of an operation that goes on behind its span, on CPUs. `next`: the row of the first operation of the same run
// and device as the last one that its thread ran before it, within the task that the thread is at; -1: there is none.
struct Mark {
  int64_t end_ps, flow, op, next;
};
// On GPUs: what the host was at when it started work, within what else it was at.
struct Scope {
  int64_t id, outer;
};
struct Piece {
  int64_t offset, size;
};
struct Line {
  int32_t plane, name;  // texts
};

// What is left of a message, or of the whole.
struct Bytes {
  const uint8_t* at;
  const uint8_t* end;
  bool fine = true;

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at == end) break;
      const uint8_t byte = *at++;
      if (shift < 64) value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
    fine = false;
    at = end;
    return 0;
  }
  // The next field: its number, 0 at the end; the value of an integer, or the bytes.
  uint32_t next(uint64_t& value, Bytes& inner) {
    if (at == end) return 0;
    const uint64_t key = varint();
    // 0 is no field's number, and would look like the end.
    if (!fine || key >> 3 == 0 || key >> 32 != 0) {
      fine = false;
      at = end;
      return 0;
    }
    value = 0;
    uint64_t size = 0;
    switch (key & 7) {
      case 0:
        value = varint();
        return fine ? static_cast<uint32_t>(key >> 3) : 0;
      case 1:
        size = 8;
        break;
      case 5:
        size = 4;
        break;
      case 2:
        size = varint();
        break;
      default:
        fine = false;
    }
    if (!fine || size > static_cast<uint64_t>(end - at)) {
      fine = false;
      at = end;
      return 0;
    }
    inner = Bytes{at, at + size};
    at += size;
    return static_cast<uint32_t>(key >> 3);
  }
  std::string_view text() const { return {reinterpret_cast<const char*>(at), static_cast<size_t>(end - at)}; }
};

struct Reader {
  const uint8_t* data;
  int64_t size;
  Row* rows;
  int64_t capacity;
  Piece* pieces;
  int64_t piece_capacity;
  Line* lines;
  int64_t line_capacity;
  Mark* marks;
  int64_t mark_capacity;
  Scope* scopes;
  int64_t scope_capacity;

  bool fine = true;
  int64_t count = 0, line_count = 0, mark_count = 0, scope_count = 0, base = INT64_MAX;
  std::unordered_map<std::string_view, int32_t> known;

  int32_t intern(std::string_view text) {
    const auto [place, fresh] = known.try_emplace(text, static_cast<int32_t>(known.size()));
    if (fresh && place->second < piece_capacity)
      pieces[place->second] = {reinterpret_cast<const uint8_t*>(text.data()) - data, static_cast<int64_t>(text.size())};
    return place->second;
  }

  // id and name of an entry of a map of metadata
  void entry(Bytes map, std::unordered_map<uint64_t, std::string_view>& names) {
    uint64_t value, id = 0;
    Bytes inner{}, field{};
    std::string_view name;
    while (const uint32_t number = map.next(value, inner)) {
      if (number == 1) id = value;
      if (number != 2) continue;
      while (const uint32_t part = inner.next(value, field)) {
        if (part == 2) name = field.text();
      }
      fine = fine && inner.fine;
    }
    fine = fine && map.fine;
    names[id] = name;
  }

  // The earliest timestamp: times are told from it, for they would not fit otherwise.
  void earliest(Bytes space) {
    uint64_t value;
    Bytes plane{}, line{}, field{};
    while (const uint32_t number = space.next(value, plane)) {
      if (number != 1) continue;
      while (const uint32_t part = plane.next(value, line)) {
        if (part != 3) continue;
        int64_t stamp = 0;
        while (const uint32_t one = line.next(value, field)) {
          if (one == 3) stamp = static_cast<int64_t>(value);
        }
        if (stamp < base) base = stamp;
      }
    }
  }

  struct Meanings {
    uint64_t op = 0, program = 0, run = 0, device = 0, begins = 0, ends = 0, scope = 0;
  };

  // A task of a pool of threads, and the first row of each run on a device within it.
  struct Task {
    struct First {
      int64_t program, run, device, row;
    };
    static constexpr int kMost = 8;
    First firsts[kMost];
    int count = 0;
    int64_t next = -1;  // the first row of the run and device of the latest row

    void add(const Row& row, int64_t place) {
      for (int i = 0; i < count; ++i) {
        if (firsts[i].program == row.program && firsts[i].run == row.run && firsts[i].device == row.device) {
          next = firsts[i].row;
          return;
        }
      }
      next = place;
      if (count < kMost) firsts[count++] = {row.program, row.run, row.device, place};
    }
  };

  // What a line, a thread, is at: its latest operation, and the tasks within one another.
  struct Thread {
    int64_t flow = 0, end_ps = 0;
    std::vector<Task> tasks = std::vector<Task>(1);
  };

  static constexpr size_t kDeepest = 1000;
  // What an event's name says: the text of X where it marks the end of X ("end: X"); or one of these.
  static constexpr int32_t kNothing = -1, kTaskBegins = -2, kTaskEnds = -3;

  // XLA on CPUs marks the end of X by "end: X", on whatever thread finished it.
  int32_t meaning_of(uint64_t id, const std::unordered_map<uint64_t, std::string_view>& events,
                     std::unordered_map<uint64_t, int32_t>& meanings) {
    const auto seen = meanings.find(id);
    if (seen != meanings.end()) return seen->second;
    const auto named = events.find(id);
    const std::string_view name = named == events.end() ? std::string_view{} : named->second;
    int32_t found = kNothing;
    if (name.size() > 5 && name.substr(0, 5) == "end: ") found = intern(name.substr(5));
    if (name == "ThreadpoolListener::StartRegion") found = kTaskBegins;
    if (name == "ThreadpoolListener::StopRegion") found = kTaskEnds;
    return meanings[id] = found;
  }

  void event(Bytes one, int64_t stamp, bool every, const Meanings& mean,
             const std::unordered_map<uint64_t, std::string_view>& events,
             const std::unordered_map<uint64_t, std::string_view>& stats,
             std::unordered_map<uint64_t, int32_t>& ids, std::unordered_map<uint64_t, int32_t>& references,
             std::unordered_map<uint64_t, int32_t>& meanings,
             Thread& thread) {
    uint64_t value, id = 0;
    Bytes inner{}, field{};
    int64_t offset = 0, duration = 0;
    Row row{0, 0, -1, 0, 0, static_cast<int32_t>(line_count - 1), -1, -1, 0};
    while (const uint32_t number = one.next(value, inner)) {
      if (number == 1) id = value;
      if (number == 2) offset = static_cast<int64_t>(value);
      if (number == 3) duration = static_cast<int64_t>(value);
      if (number != 4) continue;
      uint64_t key = 0, whole = 0, reference = 0;
      std::string_view text;
      while (const uint32_t part = inner.next(value, field)) {
        if (part == 1) key = value;
        if (part == 3 || part == 4) whole = value;
        if (part == 5) text = field.text();
        if (part == 7) reference = value;
      }
      fine = fine && inner.fine;
      if (key == 0) continue;
      if (key == mean.op && !text.empty()) row.op = intern(text);
      if (key == mean.op && reference != 0) {
        // Looked up once: a text may be long, and stand in millions of events.
        const auto known_as = references.find(reference);
        if (known_as != references.end()) {
          row.op = known_as->second;
        } else {
          const auto place = stats.find(reference);
          row.op = references[reference] = place == stats.end() ? -1 : intern(place->second);
        }
      }
      if (key == mean.program) row.program = static_cast<int64_t>(whole);
      if (key == mean.run) row.run = static_cast<int64_t>(whole);
      if (key == mean.begins || key == mean.ends || key == mean.scope) row.flow = static_cast<int64_t>(whole);
      if (key == mean.device) row.device = static_cast<int32_t>(whole);
    }
    fine = fine && one.fine;
    // Unsigned: what is nonsense wraps, and is not undefined.
    row.start_ps = static_cast<int64_t>((static_cast<uint64_t>(stamp) - static_cast<uint64_t>(base)) * 1000u +
                                        static_cast<uint64_t>(offset));
    row.duration_ps = duration;
    if (row.op < 0 && !every) {
      row.op = meaning_of(id, events, meanings);
      if (row.op == kTaskBegins && thread.tasks.size() < kDeepest) thread.tasks.emplace_back();
      if (row.op == kTaskEnds && thread.tasks.size() > 1) thread.tasks.pop_back();
      // Most stand within the operation's span, and say nothing new.
      if (row.op < 0 || row.flow == 0 || (row.flow == thread.flow && row.start_ps <= thread.end_ps)) return;
      if (mark_count < mark_capacity) marks[mark_count] = {row.start_ps, row.flow, row.op, thread.tasks.back().next};
      ++mark_count;
      return;
    }
    thread.flow = row.flow;
    thread.end_ps = static_cast<int64_t>(static_cast<uint64_t>(row.start_ps) + static_cast<uint64_t>(duration));
    thread.tasks.back().add(row, count);
    const auto place = ids.find(id);
    if (place != ids.end()) {
      row.name = place->second;
    } else {
      const auto named = events.find(id);
      row.name = ids[id] = intern(named == events.end() ? std::string_view{} : named->second);
    }
    if (count < capacity) rows[count] = row;
    ++count;
  }

  // The plane of scopes has no events: each of its stats has a scope's number as its key, and the outer one's as its value.
  void nesting(Bytes whole) {
    uint64_t value;
    Bytes inner{}, field{};
    while (const uint32_t number = whole.next(value, inner)) {
      if (number != 6) continue;
      Scope scope{0, 0};
      while (const uint32_t part = inner.next(value, field)) {
        if (part == 1) scope.id = static_cast<int64_t>(value);
        if (part == 3 || part == 4) scope.outer = static_cast<int64_t>(value);
      }
      fine = fine && inner.fine;
      if (scope_count < scope_capacity) scopes[scope_count] = scope;
      ++scope_count;
    }
  }

  void plane(Bytes whole) {
    uint64_t value;
    Bytes inner{}, field{}, again = whole;
    std::unordered_map<uint64_t, std::string_view> events, stats;
    std::unordered_map<uint64_t, int32_t> ids, references, meanings;
    std::string_view name;
    while (const uint32_t number = whole.next(value, inner)) {
      if (number == 2) name = inner.text();
      if (number == 4) entry(inner, events);
      if (number == 5) entry(inner, stats);
    }
    fine = fine && whole.fine;
    if (name == "/host:__ScopeRangeCallStack__") return nesting(again);
    Meanings mean;
    for (const auto& [id, text] : stats) {
      if (text == "hlo_op") mean.op = id;
      if (text == "program_id") mean.program = id;
      if (text == "run_id") mean.run = id;
      if (text == "device_ordinal") mean.device = id;
      if (text == "_p") mean.begins = id;
      if (text == "_c") mean.ends = id;
      if (text == "scope_range_id") mean.scope = id;
    }
    const bool every = name.substr(0, 12) == "/device:TPU:";
    while (const uint32_t number = again.next(value, inner)) {
      if (number != 3) continue;
      int64_t stamp = 0;
      Bytes events_of = inner;
      std::string_view line_name;
      while (const uint32_t part = inner.next(value, field)) {
        if (part == 2) line_name = field.text();
        if (part == 3) stamp = static_cast<int64_t>(value);
      }
      fine = fine && inner.fine;
      const Line line{intern(name), intern(line_name)};
      if (line_count < line_capacity) lines[line_count] = line;
      ++line_count;
      Thread thread;
      while (const uint32_t part = events_of.next(value, field)) {
        if (part == 4) event(field, stamp, every, mean, events, stats, ids, references, meanings, thread);
      }
    }
  }
};

}  // namespace

// Fills as much as there is room for and says in `counts` how many rows, texts, lines, marks and scopes there are. False: the
// bytes are not such a trace.
CAPIBARA_EXPORT int32_t capibara_trace_rows(const uint8_t* data, int64_t size, void* rows, int64_t capacity,
                                            void* pieces, int64_t piece_capacity, void* lines, int64_t line_capacity,
                                            void* marks, int64_t mark_capacity, void* scopes, int64_t scope_capacity,
                                            int64_t* counts) {
  Reader reader{data, size, static_cast<Row*>(rows), capacity, static_cast<Piece*>(pieces), piece_capacity,
                static_cast<Line*>(lines), line_capacity, static_cast<Mark*>(marks), mark_capacity,
                static_cast<Scope*>(scopes), scope_capacity};
  Bytes space{data, data + size}, plane{};
  reader.earliest(space);
  uint64_t value;
  while (const uint32_t number = space.next(value, plane)) {
    if (number == 1) reader.plane(plane);
  }
  counts[0] = reader.count;
  counts[1] = static_cast<int64_t>(reader.known.size());
  counts[2] = reader.line_count;
  counts[3] = reader.mark_count;
  counts[4] = reader.scope_count;
  return reader.fine && space.fine;
}
