// Causal attention over keys and values that lie anywhere: in the blocks of a cache, or in one piece.
//
// H query heads share K key/value heads; a row is one token of one sequence and sees the keys of its sequence up to its own
// position, `window` of them at most. Numbers are widened to float32 where they are read, and a result is rounded once. Every
// result is computed by one thread in an order that its row's position alone decides: sums over a head's width and over keys
// run from the first on, those of the softmax in lanes of 16 keys, counted from the sequence's first. So a row has the same bits
// alone, in any batch, in any blocks, and however its sequence was cut.

#include "lanes.h"

namespace {

constexpr int64_t TILE = 48;  // queries that pass over the same keys, turned once for all of them
constexpr int64_t ROOM = 1 << 18;  // scores that a thread holds, where more than `QUERIES` queries would need more
constexpr int64_t LINE = 64;  // bytes that come from memory together
constexpr int64_t SMALL = 1 << 12;  // pairs of a query and a key that one thread has done before another has begun

struct Place {
    void* first;
    int64_t block, head, token;  // from one to the next, in elements
};

struct Attention {
    int64_t rows, heads, kv_heads, key_width, value_width;
    int64_t block_size, window, threads;  // window 0: everything before
    int64_t is_bfloat16;                  // q, new keys and values, and what comes out
    int64_t cache_is_bfloat16;
    float scale;
    Place keys, values;
    const int64_t *positions, *tables, *blocks;  // of each row; where its sequence's blocks begin in the third; which they are
    const void *q, *new_keys, *new_values;       // the last may be null, or both: already there
    int64_t q_stride, key_stride, value_stride;  // from one row to the next, in elements
    void* out;                                   // [rows, heads, value_width]
};

// From key to key of a sequence
struct Walk {
    const int64_t* block;
    int64_t within, size;
    Walk(const Attention& m, int64_t row, int64_t position)
        : block(m.blocks + m.tables[row] + position / m.block_size), within(position % m.block_size), size(m.block_size) {}
    void next() {
        if (++within == size) within = 0, block++;
    }
    template <class T> T* at(const Place& place, int64_t kv_head) const {
        return static_cast<T*>(place.first) + *block * place.block + kv_head * place.head + within * place.token;
    }
};

// Q queries against 16 keys
template <int Q> inline void score(const float* q, const float* columns, int64_t width, float* out, int64_t stride) {
    Vec total[Q];
    for (int i = 0; i < Q; i++) total[i] = all(0);
    for (int64_t d = 0; d < width; d++, columns += LANES) {
        const Vec k = load(columns);
        for (int i = 0; i < Q; i++) total[i] = fma(all(q[i * width + d]), k, total[i]);
    }
    for (int i = 0; i < Q; i++) store(out + i * stride, total[i]);
}

template <int Q = QUERIES>
inline void scores(int64_t count, const float* q, const float* columns, int64_t width, float* out, int64_t stride) {
    if (count == Q) return score<Q>(q, columns, width, out, stride);
    if constexpr (Q > 1) scores<Q - 1>(count, q, columns, width, out, stride);
}

// Adds 16 columns of values begin ... end, times the shares of Q queries
template <int Q, class T>
inline void mix(const float* shares, int64_t stride, const T* const* values, int64_t column, int64_t begin, int64_t end, Vec* out) {
    Vec total[Q];
    for (int i = 0; i < Q; i++) total[i] = out[i];
    for (int64_t key = begin; key < end; key++) {
        const Vec v = cached(values[key] + column);
        for (int i = 0; i < Q; i++) total[i] = fma(all(shares[i * stride + key]), v, total[i]);
    }
    for (int i = 0; i < Q; i++) out[i] = total[i];
}

template <int Q = QUERIES, class T>
inline void mixes(int64_t count, const float* shares, int64_t stride, const T* const* values, int64_t column, int64_t begin,
                  int64_t end, Vec* out) {
    if (count == Q) return mix<Q>(shares, stride, values, column, begin, end, out);
    if constexpr (Q > 1) mixes<Q - 1>(count, shares, stride, values, column, begin, end, out);
}

// Rows of one sequence, one after the other in it, and heads of one key/value head
struct Unit { int64_t row, rows, head, heads; };

// What a thread works in
template <class T> struct Room {
    Floats q, columns, scores, inverses;
    std::vector<const T*> values;
    int64_t stride;
    Room(const Attention& m, int64_t queries, int64_t keys)
        : q(floats(queries * m.key_width)), columns(floats(m.key_width * LANES)), scores(floats(queries * (keys + LANES))),
          inverses(floats(queries)), values(keys + LANES), stride(keys + LANES) {}
};

template <class Q, class T> void attend(const Attention& m, const Unit& u, Room<T>& room) {
    const int64_t width = m.key_width, count = u.rows * u.heads, kv_head = u.head / (m.heads / m.kv_heads);
    const auto limit = [&](int64_t i) { return m.positions[u.row + i / u.heads] + 1; };
    const auto start = [&](int64_t i) { return m.window ? std::max<int64_t>(0, limit(i) - m.window) : 0; };
    for (int64_t i = 0; i < count; i++) {
        const Q* from = static_cast<const Q*>(m.q) + (u.row + i / u.heads) * m.q_stride + (u.head + i % u.heads) * width;
        for (int64_t d = 0; d < width; d++) room.q[i * width + d] = widened(from[d]) * m.scale;
    }
    // of keys before `origin` nobody has a score here
    const int64_t origin = start(0) / LANES * LANES, end = limit(count - 1);
    Walk walk(m, u.row, origin), ahead = walk;
    int64_t fetched = origin;
    const auto fetch = [&] {  // 16 keys and their values, which come from memory while others are multiplied
        for (const int64_t stop = std::min(fetched + LANES, end); fetched < stop; fetched++) {
            const T *key = ahead.at<T>(m.keys, kv_head), *value = ahead.at<T>(m.values, kv_head);
            for (int64_t d = 0; d < width; d += LINE / sizeof(T)) __builtin_prefetch(key + d);
            for (int64_t d = 0; d < m.value_width; d += LINE / sizeof(T)) __builtin_prefetch(value + d);
            if (fetched + 1 < end) ahead.next();
        }
    };
    fetch();
    for (int64_t key = origin; key < end; key += LANES) {
        fetch();
        Rows16<T> rows;
        for (int64_t i = 0; i < LANES; i++) {
            rows.at[i] = walk.at<T>(m.keys, kv_head);
            room.values[key - origin + i] = walk.at<T>(m.values, kv_head);
            if (key + i + 1 < end) walk.next();  // else the last one again
        }
        put_columns(rows, width, room.columns.get());
        for (int64_t i = 0; i < count; i += QUERIES) {
            const int64_t some = std::min<int64_t>(QUERIES, count - i);
            if (key >= limit(i + some - 1) || key + LANES <= start(i)) continue;
            scores(some, room.q.get() + i * width, room.columns.get(), width, room.scores.get() + i * room.stride + key - origin,
                   room.stride);
        }
    }
    for (int64_t i = 0; i < count; i++)
        room.inverses[i] = soften(room.scores.get() + i * room.stride, start(i) - origin, limit(i) - origin);
    for (int64_t i = 0; i < count; i += QUERIES) {
        const int64_t some = std::min<int64_t>(QUERIES, count - i);
        // what all of these queries see
        const int64_t first = std::min(start(i + some - 1), limit(i)) - origin, last = limit(i) - origin;
        for (int64_t column = 0; column < m.value_width; column += LANES) {
            const float* shares = room.scores.get() + i * room.stride;
            const T* const* values = room.values.data();
            Vec made[QUERIES];
            for (int64_t j = 0; j < some; j++) {
                made[j] = all(0);
                mix<1>(shares + j * room.stride, room.stride, values, column, start(i + j) - origin, first, made + j);
            }
            mixes(some, shares, room.stride, values, column, first, last, made);
            for (int64_t j = 0; j < some; j++) {
                const int64_t rest = std::max(last, start(i + j) - origin);
                mix<1>(shares + j * room.stride, room.stride, values, column, rest, limit(i + j) - origin, made + j);
                const int64_t place = (u.row + (i + j) / u.heads) * m.heads + u.head + (i + j) % u.heads;
                Q* to = static_cast<Q*>(m.out) + place * m.value_width + column;
                const Vec v = made[j] * all(room.inverses[i + j]);
                if constexpr (sizeof(Q) == 2) narrow(to, v);
                else store(to, v);
            }
        }
    }
}

template <class Q, class T> void write(const Attention& m, int64_t row, int64_t kv_head) {
    const Q* key = static_cast<const Q*>(m.new_keys) + row * m.key_stride + kv_head * m.key_width;
    const Walk place(m, row, m.positions[row]);
    T* to = place.at<T>(m.keys, kv_head);
    for (int64_t d = 0; d < m.key_width; d++) put(to + d, widened(key[d]));
    if (!m.new_values) return;
    const Q* value = static_cast<const Q*>(m.new_values) + row * m.value_stride + kv_head * m.value_width;
    to = place.at<T>(m.values, kv_head);
    for (int64_t d = 0; d < m.value_width; d++) put(to + d, widened(value[d]));
}

template <class Q, class T> void run(const Attention& m) {
    const int64_t group = m.heads / m.kv_heads;
    int64_t keys = 0, pairs = 0;
    for (int64_t r = 0; r < m.rows; r++) keys = std::max(keys, m.positions[r] + 1), pairs += (m.positions[r] + 1) * m.heads;
    keys = (keys + LANES - 1) / LANES * LANES;
    const int64_t threads = pairs < SMALL ? 1 : m.threads;
    // few rows: fewer heads a unit, so that every thread has work
    const int64_t shares = std::clamp<int64_t>(2 * threads / std::max<int64_t>(1, m.rows * m.kv_heads), 1, group);
    const int64_t most = std::clamp<int64_t>(ROOM / keys, QUERIES, TILE);
    const int64_t heads = std::min((group + shares - 1) / shares, most), rows = most / heads;
    std::vector<Unit> units;
    for (int64_t r = 0, next; r < m.rows; r = next) {
        for (next = r + 1; next < std::min(m.rows, r + rows); next++)
            if (m.tables[next] != m.tables[r] || m.positions[next] != m.positions[next - 1] + 1) break;
        for (int64_t k = 0; k < m.kv_heads; k++)
            for (int64_t h = 0; h < group; h += heads) units.push_back({r, next - r, k * group + h, std::min(heads, group - h)});
    }
    std::vector<Room<T>> rooms;
    for (int64_t i = 0; i < threads; i++) rooms.emplace_back(m, heads * rows, keys);

#pragma omp parallel num_threads(int(threads))
    {
        if (m.new_keys) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < m.rows * m.kv_heads; i++) write<Q, T>(m, i / m.kv_heads, i % m.kv_heads);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < int64_t(units.size()); i++) attend<Q, T>(m, units[i], rooms[omp_get_thread_num()]);
    }
}

}  // namespace

extern "C" {

// 0, or 1 where there was no memory
int pellucid_attend(const Attention* m) try {
    if (m->is_bfloat16 && m->cache_is_bfloat16) run<bfloat16, bfloat16>(*m);
    else if (m->is_bfloat16) run<bfloat16, float>(*m);
    else if (m->cache_is_bfloat16) run<float, bfloat16>(*m);
    else run<float, float>(*m);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

}
