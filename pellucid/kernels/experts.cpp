// The feed-forward networks of a layer's experts, forward and backward, in float32, over rows sorted by expert.
//
// N tokens of width D go to K of E experts each; I is the width inside an expert; D and I are multiples of 16. A row is one of
// the N K pairs of a token and an expert, and those of one expert are neighbours. All products are of panels: ROWS rows of the
// one side, the sum's index first, times 16 columns of the other side, which stay in the nearest cache while all rows of an
// expert pass. What stands between the products is done where a product leaves its registers.
//
// Every number is computed by one thread in an order that depends on nothing but the rows it sums over: a token's output has
// the same bits alone and in any batch, and gradients do not depend on the number of threads.

#include "lanes.h"

namespace {

constexpr int BLOCK = 4;  // panels of rows that pass over 16 columns together

struct Experts {
    int64_t tokens, choices, experts, width, inner, threads;
    const int64_t* starts;        // [experts + 1]: the rows of an expert, from its start to the next one's
    const int64_t* order;         // [rows]: token * choices + choice of each row
    const float* x;               // [tokens, width]
    const float* shares;          // [tokens, choices]: what an expert's output counts
    const float* const* weights;  // [3 * experts]: gate [inner, width], up [inner, width], down [width, inner]
    float* wide;                  // [rows, 2 * inner]: gates, then ups; forward makes it, backward reads it
};

struct Gradients {
    const float* out;  // [tokens, width]
    float* x;          // [tokens, width]
    float* shares;     // [tokens, choices]
    float* wide;       // [experts, 2 * inner, width]: of gates, then ups; null: not wanted
    float* down;       // [experts, width, inner]; null as well
};

// Neighbouring rows of one expert
struct Panel { int64_t expert, row; int count; };

struct Panels {
    std::vector<Panel> all;
    std::vector<int64_t> first;  // [experts + 1]: of each expert
    int64_t most = 0;            // rows of an expert

    explicit Panels(const Experts& m) {
        for (int64_t e = 0; e < m.experts; e++) {
            first.push_back(int64_t(all.size()));
            most = std::max(most, m.starts[e + 1] - m.starts[e]);
            for (int64_t row = m.starts[e]; row < m.starts[e + 1]; row += ROWS)
                all.push_back({e, row, int(std::min<int64_t>(ROWS, m.starts[e + 1] - row))});
        }
        first.push_back(int64_t(all.size()));
    }
};

// a [depth, ROWS] times b [depth, 16]: R rows of 16 sums
template <int R> inline void multiply(const float* a, const float* b, int64_t depth, Vec* out) {
    Vec total[R];
    for (int r = 0; r < R; r++) total[r] = all(0);
    for (int64_t k = 0; k < depth; k++, a += ROWS, b += LANES) {
        const Vec columns = load(b);
        for (int r = 0; r < R; r++) total[r] = fma(all(a[r]), columns, total[r]);
    }
    for (int r = 0; r < R; r++) out[r] = total[r];
}

template <int R = ROWS> inline void product(int count, const float* a, const float* b, int64_t depth, Vec* out) {
    if (count == R) return multiply<R>(a, b, depth, out);
    if constexpr (R > 1) product<R - 1>(count, a, b, depth, out);
}

// Some rows of `depth` numbers, into a panel [depth, ROWS]
inline void put_rows(const float* const* rows, int count, int64_t depth, float* to) {
    if (count == ROWS)
        for (int64_t k = 0; k < depth; k++, to += ROWS)
            for (int r = 0; r < ROWS; r++) to[r] = rows[r][k];
    else
        for (int64_t k = 0; k < depth; k++, to += ROWS)
            for (int r = 0; r < count; r++) to[r] = rows[r][k];
}

// The same columns, up to ROWS, of many rows, into a panel [many, ROWS]
template <class Rows> inline void put_parts(Rows row, int64_t many, int64_t first, int count, float* to) {
    if (count == ROWS)
        for (int64_t r = 0; r < many; r++, to += ROWS) std::memcpy(to, row(r) + first, ROWS * sizeof(float));
    else
        for (int64_t r = 0; r < many; r++, to += ROWS) std::copy_n(row(r) + first, count, to);
}

// 16 columns of `depth` rows, into a panel [depth, 16]
inline void put_slices(const float* from, int64_t stride, int64_t depth, float* to) {
    for (int64_t k = 0; k < depth; k++, to += LANES, from += stride) store(to, load(from));
}

// The lines of weights that a thread probably reads next: they come from memory while it multiplies, some with each panel
struct Ahead {
    const float* first = nullptr;
    int64_t count = 0, step = 0, done = 0;  // numbers from one line to the next
    void fetch(int64_t panels) {
        for (const int64_t stop = std::min(count, done + count / panels + 1); done < stop; done++) __builtin_prefetch(first + done * step);
    }
};

// sums [rows, width] of rows by the token that they are of, each times its share where there are any
inline void add_up(const Experts& m, const int64_t* place, const float* rows, const float* shares, int64_t token, float* out) {
    for (int64_t d = 0; d < m.width; d += LANES) {
        Vec total = all(0);
        for (int64_t c = token * m.choices; c < (token + 1) * m.choices; c++)
            total = fma(all(shares ? shares[c] : 1.0f), load(rows + place[c] * m.width + d), total);
        store(out + token * m.width + d, total);
    }
}

void forward(const Experts& m, float* out) {
    const Panels panels(m);
    const int64_t count = int64_t(panels.all.size()), rows = m.tokens * m.choices;
    const int64_t inner_tiles = m.inner / LANES, width_tiles = m.width / LANES, deepest = std::max(m.width, m.inner);
    const Floats x = floats(count * ROWS * m.width), active = floats(count * ROWS * m.inner), made = floats(rows * m.width);
    const Floats room = floats(m.threads * deepest * LANES);
    std::vector<int64_t> place(rows);

#pragma omp parallel num_threads(int(m.threads))
    {
        float* columns = room.get() + omp_get_thread_num() * deepest * LANES;
        Vec sums[ROWS];
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < rows; r++) place[m.order[r]] = r;
#pragma omp for schedule(static)
        for (int64_t p = 0; p < count; p++) {
            const Panel& panel = panels.all[p];
            const float* from[ROWS];
            for (int r = 0; r < panel.count; r++) from[r] = m.x + m.order[panel.row + r] / m.choices * m.width;
            put_rows(from, panel.count, m.width, x.get() + p * ROWS * m.width);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = 0; u < m.experts * inner_tiles; u++) {
            const int64_t e = u / inner_tiles, at = u % inner_tiles * LANES;
            for (int part = 0; part < 2 && panels.first[e] < panels.first[e + 1]; part++) {
                put_columns(Rows16(m.weights[3 * e + part] + at * m.width, m.width), m.width, columns);
                const int64_t next = part ? std::min(u + m.threads, m.experts * inner_tiles - 1) : u;
                Ahead ahead{m.weights[next / inner_tiles * 3 + 1 - part] + next % inner_tiles * LANES * m.width, m.width, LANES};
                for (int64_t p = panels.first[e]; p < panels.first[e + 1]; p++) {
                    const Panel& panel = panels.all[p];
                    ahead.fetch(panels.first[e + 1] - panels.first[e]);
                    product(panel.count, x.get() + p * ROWS * m.width, columns, m.width, sums);
                    for (int r = 0; r < panel.count; r++) {
                        float* to = m.wide + (panel.row + r) * 2 * m.inner + at;
                        store(to + part * m.inner, sums[r]);
                        if (part == 0) continue;
                        float values[LANES];
                        const Vec gate = load(to);
                        store(values, gate / (all(1) + exponential(all(0) - gate)) * sums[r]);
                        for (int i = 0; i < LANES; i++) active[(p * m.inner + at + i) * ROWS + r] = values[i];
                    }
                }
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = 0; u < m.experts * width_tiles; u++) {
            const int64_t e = u / width_tiles, at = u % width_tiles * LANES;
            if (panels.first[e] == panels.first[e + 1]) continue;
            put_columns(Rows16(m.weights[3 * e + 2] + at * m.inner, m.inner), m.inner, columns);
            const int64_t next = std::min(u + m.threads, m.experts * width_tiles - 1);
            Ahead ahead{m.weights[next / width_tiles * 3 + 2] + next % width_tiles * LANES * m.inner, m.inner, LANES};
            for (int64_t p = panels.first[e]; p < panels.first[e + 1]; p++) {
                const Panel& panel = panels.all[p];
                ahead.fetch(panels.first[e + 1] - panels.first[e]);
                product(panel.count, active.get() + p * ROWS * m.inner, columns, m.inner, sums);
                for (int r = 0; r < panel.count; r++) store(made.get() + (panel.row + r) * m.width + at, sums[r]);
            }
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < m.tokens; t++) add_up(m, place.data(), made.get(), m.shares, t, out);
    }
}

// Of to [outputs, inputs], the transpose of rows [count, outputs] times rows in panels [inputs / 16][count, 16], some outputs
template <class Rows>
void weights_of(Rows row, int64_t count, int64_t first, int64_t last, const float* others, int64_t inputs, float* block, float* to) {
    const int64_t panel = count * ROWS;
    const auto outputs = [&](int64_t o) { return int(std::min<int64_t>(ROWS, last - o)); };
    for (int64_t o = first; o < last; o += ROWS) put_parts(row, count, o, outputs(o), block + (o - first) / ROWS * panel);
    Vec sums[ROWS];
    for (int64_t at = 0; at < inputs; at += LANES, others += count * LANES)
        for (int64_t o = first; o < last; o += ROWS) {
            product(outputs(o), block + (o - first) / ROWS * panel, others, count, sums);
            for (int i = 0; i < outputs(o); i++) store(to + (o + i) * inputs + at, sums[i]);
        }
}

void backward(const Experts& m, const Gradients& g) {
    const Panels panels(m);
    const int64_t count = int64_t(panels.all.size()), rows = m.tokens * m.choices, both = 2 * m.inner;
    const int64_t inner_tiles = m.inner / LANES, width_tiles = m.width / LANES, deepest = std::max(m.width, both);
    const int64_t at_once = BLOCK * ROWS, inner_blocks = (m.inner + at_once - 1) / at_once, width_blocks = (m.width + at_once - 1) / at_once;
    const int64_t of_expert = g.wide ? 2 * inner_blocks + width_blocks : 0;
    const Floats outs = floats(count * ROWS * m.width);  // panels of the gradient; later the rows of x's
    const Floats wide = floats(rows * both), turned = floats(count * ROWS * both), dots = floats(rows * inner_tiles);
    const Floats x = floats(g.wide ? rows * m.width : 0), active = floats(g.wide ? rows * m.inner : 0);
    const int64_t needed = std::max(deepest * LANES, panels.most * at_once);
    const Floats room = floats(m.threads * needed);
    std::vector<int64_t> place(rows), token(rows);

#pragma omp parallel num_threads(int(m.threads))
    {
        float* mine = room.get() + omp_get_thread_num() * needed;
        Vec sums[ROWS];
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) place[m.order[r]] = r, token[r] = m.order[r] / m.choices;
#pragma omp for schedule(static)
        for (int64_t p = 0; p < count; p++) {
            const Panel& panel = panels.all[p];
            const float* from[ROWS];
            for (int r = 0; r < panel.count; r++) from[r] = g.out + token[panel.row + r] * m.width;
            put_rows(from, panel.count, m.width, outs.get() + p * ROWS * m.width);
            if (!g.wide) continue;
            const int64_t start = m.starts[panel.expert], size = m.starts[panel.expert + 1] - start;
            for (int r = 0; r < panel.count; r++)
                for (int64_t t = 0; t < width_tiles; t++)
                    store(x.get() + start * m.width + (t * size + panel.row + r - start) * LANES,
                          load(m.x + token[panel.row + r] * m.width + t * LANES));
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = 0; u < m.experts * inner_tiles; u++) {
            const int64_t e = u / inner_tiles, t = u % inner_tiles, start = m.starts[e], size = m.starts[e + 1] - start;
            if (!size) continue;
            put_slices(m.weights[3 * e + 2] + t * LANES, m.inner, m.width, mine);
            const int64_t next = std::min(u + m.threads, m.experts * inner_tiles - 1);
            Ahead ahead{m.weights[next / inner_tiles * 3 + 2] + next % inner_tiles * LANES, m.width, m.inner};
            for (int64_t p = panels.first[e]; p < panels.first[e + 1]; p++) {
                const Panel& panel = panels.all[p];
                ahead.fetch(panels.first[e + 1] - panels.first[e]);
                product(panel.count, outs.get() + p * ROWS * m.width, mine, m.width, sums);
                for (int r = 0; r < panel.count; r++) {
                    const int64_t row = panel.row + r;
                    const float* made = m.wide + row * both + t * LANES;
                    const Vec gate = load(made), up = load(made + m.inner), one = all(1), share = all(m.shares[m.order[row]]);
                    const Vec sigmoid = one / (one + exponential(all(0) - gate)), silu = gate * sigmoid, inside = silu * up;
                    dots[row * inner_tiles + t] = sum(sums[r] * inside);
                    const Vec grad = sums[r] * share;
                    float* to = wide.get() + row * both + t * LANES;
                    store(to, grad * up * (sigmoid * fma(gate, one - sigmoid, one)));
                    store(to + m.inner, grad * silu);
                    if (g.wide) store(active.get() + start * m.inner + (t * size + row - start) * LANES, inside * share);
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t p = 0; p < count; p++) {
            const Panel& panel = panels.all[p];
            const float* from[ROWS];
            for (int r = 0; r < panel.count; r++) {
                from[r] = wide.get() + (panel.row + r) * both;
                float total = 0;
                for (int64_t t = 0; t < inner_tiles; t++) total += dots[(panel.row + r) * inner_tiles + t];
                g.shares[m.order[panel.row + r]] = total;
            }
            put_rows(from, panel.count, both, turned.get() + p * ROWS * both);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t u = 0; u < m.experts * width_tiles; u++) {
            const int64_t e = u / width_tiles, at = u % width_tiles * LANES;
            if (panels.first[e] == panels.first[e + 1]) continue;
            put_slices(m.weights[3 * e] + at, m.width, m.inner, mine);
            put_slices(m.weights[3 * e + 1] + at, m.width, m.inner, mine + m.inner * LANES);
            const int64_t next = std::min(u + m.threads, m.experts * width_tiles - 1), place = next % width_tiles * LANES;
            Ahead gates{m.weights[next / width_tiles * 3] + place, m.inner, m.width};
            Ahead ups{m.weights[next / width_tiles * 3 + 1] + place, m.inner, m.width};
            for (int64_t p = panels.first[e]; p < panels.first[e + 1]; p++) {
                const Panel& panel = panels.all[p];
                gates.fetch(panels.first[e + 1] - panels.first[e]), ups.fetch(panels.first[e + 1] - panels.first[e]);
                product(panel.count, turned.get() + p * ROWS * both, mine, both, sums);
                for (int r = 0; r < panel.count; r++) store(outs.get() + (panel.row + r) * m.width + at, sums[r]);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = 0; u < m.experts * of_expert; u++) {
            const int64_t e = u / of_expert, start = m.starts[e], size = m.starts[e + 1] - start, n = u % of_expert;
            if (n < 2 * inner_blocks) {
                const int64_t part = n / inner_blocks, first = n % inner_blocks * at_once;
                const auto row = [&](int64_t r) { return wide.get() + (start + r) * both + part * m.inner; };
                weights_of(row, size, first, std::min(first + at_once, m.inner), x.get() + start * m.width, m.width, mine,
                           g.wide + (2 * e + part) * m.inner * m.width);
            } else {
                const int64_t first = (n - 2 * inner_blocks) * at_once;
                const auto row = [&](int64_t r) { return g.out + token[start + r] * m.width; };
                weights_of(row, size, first, std::min(first + at_once, m.width), active.get() + start * m.inner, m.inner, mine,
                           g.down + e * m.width * m.inner);
            }
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < m.tokens; t++) add_up(m, place.data(), outs.get(), nullptr, t, g.x);
    }
}

}  // namespace

extern "C" {

// Both give 0, or 1 where there was no memory.

int pellucid_experts_forward(const Experts* m, float* out) try {
    forward(*m, out);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

int pellucid_experts_backward(const Experts* m, const Gradients* g) try {
    backward(*m, *g);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

}
