// Kernels for the CPU: linear layers whose weights have 4, 8, 16 or 32 bits, and a whole decoder of them over a paged cache.
//
// Built on first use (build.py) and called through a C interface (linear.py, and fused.py of inference/), without torch's
// headers. Every result is computed by one thread in an order that depends neither on the number of threads nor on the other
// rows of a call: a row has the same bits alone, in any batch, and however its sequence was cut into steps. Only a forward of
// plain weights, which need not be exact, adds in another order from `MANY` rows on. Sums are float32, each multiplication and
// addition is written as one `fma`, and the compiler may contract nothing by itself.
//
// Plain weights are rows of float32 or bfloat16, an output's inputs one after the other. Packed weights: outputs in tiles of
// 16, inputs in groups of 32. A group of 4 bits is four times 16 words of 32 bits, a word an output's 8 levels of 8 inputs,
// followed by the tile's 16 scales and 16 zeros in bfloat16: 320 bytes. A group of 8 bits is eight times 16 words of 4 levels:
// 512 bytes; its scales stand apart. weight = (level - 8) * scale + zero, or level * scale.
//
// Where the processor multiplies pairs of bfloat16 (`PAIRS`), the inputs of layers of 4 and 16 bits are rounded to it; levels
// are exact.

#include "lanes.h"

namespace {

constexpr int GROUP = 32, GROUP4 = 320, GROUP8 = 512;
constexpr int MANY = 12;  // rows from which on plain weights are turned first
constexpr int WIDENED = 4, MANY_NARROW = 48;  // those of 16 bits: widened, and turned

// -- linear layers ------------------------------------------------------------------------------------------------------

struct Linear {
    const uint8_t* weights;
    const float* scales;  // of 8 bits, [tiles * 16]
    const float* bias;    // [tiles * 16], or null
    int64_t bits, groups, tiles, outputs;
};

// rows [rows, stride] of float32, groups * 32 of each are read; what `prepare` makes of them: with PAIRS their roundings, which
// layers of 4 and 16 bits read, and their sums by group, which layers of 4 bits read
struct Inputs {
    float* values;
    bfloat16* pairs;
    float* sums;
    int64_t stride;
    float* columns = nullptr;  // [threads, stride * 16]: room for plain weights turned; null: a row has the same bits in any number
};

inline void prepare(const Inputs& in, int64_t row, int64_t groups) {
    const float* x = in.values + row * in.stride;
    for (int64_t g = 0; g < groups; g++, x += GROUP) {
        Vec a = load(x), b = load(x + LANES);
#if PAIRS
        bfloat16* to = in.pairs + row * in.stride + g * GROUP;
        narrow(to, a), narrow(to + LANES, b);
        a = widen(to), b = widen(to + LANES);
#endif
        in.sums[row * (in.stride / GROUP) + g] = sum(a + b);
    }
}

#if PAIRS && defined(__AVX512BF16__)
using Pairs = __m512i;
inline Pairs pairs_of(Words w, int i) {  // levels i and i + 4 of each word
    const __m512i levels = _mm512_set_epi16(
        0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0,
        0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
    return _mm512_permutexvar_epi16(_mm512_srli_epi32(w.v, 4 * i), levels);  // looks at five bits: the table stands there twice
}
inline Vec add_pairs(Vec sum, Pairs p, const bfloat16* x) {
    int32_t both;
    std::memcpy(&both, x, 4);
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)p, (__m512bh)_mm512_set1_epi32(both))};
}
#elif PAIRS
struct Pairs { Vec even, odd; };
inline Pairs pairs_of(Words w, int i) { return {nibble(w, i), nibble(w, i + 4)}; }
inline Vec add_pairs(Vec sum, Pairs p, const bfloat16* x) {
    return fma(p.odd, all(widen_one(x[1])), fma(p.even, all(widen_one(x[0])), sum));
}
#endif

// T tiles of outputs of R rows
template <int R, int T> inline void multiply4(const Linear& l, int64_t tile, const Inputs& in, int64_t row, Vec (&out)[T][R]) {
    const uint8_t* w = l.weights + tile * l.groups * GROUP4;
    const int64_t next = l.groups * GROUP4, sums_stride = in.stride / GROUP;
    const float* sums = in.sums + row * sums_stride;
    Vec total[T][R];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) total[t][r] = all(0);
    for (int64_t g = 0; g < l.groups; g++, w += GROUP4) {
        Vec part[T][R];
        for (int t = 0; t < T; t++)
            for (int r = 0; r < R; r++) part[t][r] = all(0);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
#if PAIRS
            const bfloat16* x = in.pairs + row * in.stride + g * GROUP + 8 * c;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                for (int t = 0; t < T; t++) {
                    Pairs p = pairs_of(words(w + t * next + 64 * c), i);
                    for (int r = 0; r < R; r++) part[t][r] = add_pairs(part[t][r], p, x + r * in.stride + 2 * i);
                }
#else
            const float* x = in.values + row * in.stride + g * GROUP + 8 * c;
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                for (int t = 0; t < T; t++) {
                    Vec level = nibble(words(w + t * next + 64 * c), i);
                    for (int r = 0; r < R; r++)
                        part[t][r] = fma(all(x[r * in.stride + (i < 4 ? 2 * i : 2 * i - 7)]), level, part[t][r]);
                }
#endif
        }
        for (int t = 0; t < T; t++) {
            const bfloat16* at = reinterpret_cast<const bfloat16*>(w + t * next + 256);
            Vec scale = widen(at), zero = fma(all(-8), scale, widen(at + LANES));
            for (int r = 0; r < R; r++)
                total[t][r] = fma(all(sums[r * sums_stride + g]), zero, fma(part[t][r], scale, total[t][r]));
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) out[t][r] = total[t][r];
}

template <int R, int T> inline void multiply8(const Linear& l, int64_t tile, const Inputs& in, int64_t row, Vec (&out)[T][R]) {
    const uint8_t* w = l.weights + tile * l.groups * GROUP8;
    const int64_t next = l.groups * GROUP8;
    const float* x = in.values + row * in.stride;
    Vec total[T][R];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) total[t][r] = all(0);
    for (int64_t c = 0; c < l.groups * 8; c++, w += 64, x += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            for (int t = 0; t < T; t++) {
                Vec level = byte(words(w + t * next), i);
                for (int r = 0; r < R; r++) total[t][r] = fma(all(x[r * in.stride + i]), level, total[t][r]);
            }
    for (int t = 0; t < T; t++) {
        Vec scale = load(l.scales + (tile + t) * LANES);
        for (int r = 0; r < R; r++) out[t][r] = total[t][r] * scale;
    }
}

// Plain weights W: to four outputs of R rows, each a product of two rows, `count` inputs are added, which begin at w and at `first`
template <int R, class W>
inline void add_dots(const W* const* w, const Inputs& in, int64_t row, int64_t first, int64_t count, Dot (&total)[R][4]) {
#if PAIRS && defined(__AVX512BF16__)
    if constexpr (sizeof(W) == 2) {
        for (int64_t k = 0; k < count; k += 32) {
            __m512i x[R];
            for (int r = 0; r < R; r++) x[r] = _mm512_loadu_si512(in.pairs + (row + r) * in.stride + first + k);
            for (int o = 0; o < 4; o++) {
                const __m512i weight = _mm512_loadu_si512(w[o] + k);
                for (int r = 0; r < R; r++) total[r][o] = {_mm512_dpbf16_ps(total[r][o].v, (__m512bh)weight, (__m512bh)x[r])};
            }
        }
    } else
#endif
        for (int64_t k = 0; k < count; k += DOT_STEP) {
            Dot x[R];
            for (int r = 0; r < R; r++) {
                const int64_t at = (row + r) * in.stride + first + k;
                x[r] = kept(PAIRS && sizeof(W) == 2 ? dot_load(in.pairs + at) : dot_load(in.values + at));
            }
            for (int o = 0; o < 4; o++) {
                if (sizeof(W) == 2) __builtin_prefetch(w[o] + k + 4 * count);  // the next four outputs'
                const Dot weight = kept(dot_load(w[o] + k));
                for (int r = 0; r < R; r++) total[r][o] = fma(x[r], weight, total[r][o]);
            }
        }
}

template <int R, class W> inline void dots(const W* const* w, int64_t inputs, const Inputs& in, int64_t row, float (*out)[LANES]) {
    Dot total[R][4];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < 4; o++) total[r][o] = dot_zero();
    add_dots<R>(w, in, row, 0, inputs, total);
    for (int r = 0; r < R; r++) sums_of_four(total[r], out[r]);
}

template <int R, class W> inline void multiply_plain(const Linear& l, int64_t tile, const Inputs& in, int64_t row, Vec (&out)[1][R]) {
    const W* weights = reinterpret_cast<const W*>(l.weights);
    const int64_t inputs = l.groups * GROUP;
    float made[R][LANES];
    for (int o = 0; o < LANES; o += 4) {
        const W* rows[4];
        for (int i = 0; i < 4; i++) rows[i] = weights + std::min(tile * LANES + o + i, l.outputs - 1) * inputs;
        dots<R>(rows, inputs, in, row, reinterpret_cast<float(*)[LANES]>(made[0] + o));
    }
    for (int r = 0; r < R; r++) out[0][r] = load(made[r]);
}

template <int R, int T> inline void multiply(const Linear& l, int64_t tile, const Inputs& in, int64_t row, Vec (&out)[T][R]) {
    if (l.bits == 4) multiply4<R, T>(l, tile, in, row, out);
    else if (l.bits == 8) multiply8<R, T>(l, tile, in, row, out);
    else if constexpr (T == 1 && R <= DOT_ROWS) {
        if (l.bits == 16) multiply_plain<R, bfloat16>(l, tile, in, row, out);
        else multiply_plain<R, float>(l, tile, in, row, out);
    }
    if (l.bias)
        for (int t = 0; t < T; t++)
            for (int r = 0; r < R; r++) out[t][r] = out[t][r] + load(l.bias + (tile + t) * LANES);
}

// Where products go
struct Output {
    float* to;  // [rows, stride]
    int64_t stride;
    enum { STORE, ADD, GATE } how;  // GATE: silu of what stands there, times the product
};

inline void emit(const Output& out, int64_t row, int64_t tile, Vec v) {
    float* at = out.to + row * out.stride + tile * LANES;
    if (out.how == Output::ADD) v = load(at) + v;
    if (out.how == Output::GATE) {
        Vec gate = load(at);
        v = gate / (all(1) + exponential(all(0) - gate)) * v;
    }
    store(at, v);
}

// Tiles first ... last of some rows
template <int R, int T>
void block(const Linear& l, int64_t first, int64_t last, const Inputs& in, int64_t row, const Output& to) {
    int64_t tile = first;
    for (; tile + T <= last; tile += T) {
        Vec out[T][R];
        multiply<R, T>(l, tile, in, row, out);
        for (int t = 0; t < T; t++)
            for (int r = 0; r < R; r++) emit(to, row + r, tile + t, out[t][r]);
    }
    if constexpr (T > 1)
        if (tile < last) block<R, 1>(l, tile, last, in, row, to);
}

// Many rows of plain weights: 16 outputs' weights are turned once, and then a sum takes no steps between lanes
template <int R>
inline void multiply_columns(const Linear& l, int64_t tile, const float* columns, const Inputs& in, int64_t row, const Output& to) {
    const float* x = in.values + row * in.stride;
    Vec total[R];
    for (int r = 0; r < R; r++) total[r] = all(0);
    for (int64_t k = 0; k < l.groups * GROUP; k++, columns += LANES) {
        const Vec weights = load(columns);
        for (int r = 0; r < R; r++) total[r] = fma(all(x[r * in.stride + k]), weights, total[r]);
    }
    for (int r = 0; r < R; r++) emit(to, row + r, tile, l.bias ? total[r] + load(l.bias + tile * LANES) : total[r]);
}

template <int R = ROWS>
inline void remaining(int64_t rows, const Linear& l, int64_t tile, const float* columns, const Inputs& in, int64_t row, const Output& to) {
    if (rows == R) return multiply_columns<R>(l, tile, columns, in, row, to);
    if constexpr (R > 1) remaining<R - 1>(rows, l, tile, columns, in, row, to);
}

template <class W>
void linear_columns(const Linear& l, int64_t first, int64_t last, const Inputs& in, int64_t rows, const Output& to) {
    float* columns = in.columns + omp_get_thread_num() * in.stride * LANES;
    const int64_t inputs = l.groups * GROUP;
    for (int64_t tile = first; tile < last; tile++) {
        const W* weights = reinterpret_cast<const W*>(l.weights) + tile * LANES * inputs;
        put_columns(Rows16<W>(weights, inputs, l.outputs - tile * LANES), inputs, columns);
        for (int64_t row = 0; row < rows; row += ROWS) remaining(std::min<int64_t>(ROWS, rows - row), l, tile, columns, in, row, to);
    }
}

// Calls f with the number of rows that are best multiplied next, as a constant; the number
template <int R = DOT_ROWS, class F> inline int64_t some_rows(int64_t left, F f) {
    if constexpr (R > 1)
        if (left < R || (left == R + 1 && R > 2)) return some_rows<R - 1>(left, f);  // two and two are better than three and one
    f(std::integral_constant<int, R>());
    return R;
}

// Many rows of weights of 16 bits, each number with the bits that `multiply_plain` gives it: four outputs' weights are widened
// once for some rows, as many inputs at a time as stay in the nearest cache
constexpr int64_t SOME_ROWS = 16 * DOT_ROWS, SOME_INPUTS = 768;

template <int R>
inline void widened_rows(const float* const* w, const Inputs& in, int64_t row, int64_t first, int64_t count, int64_t inputs,
                         Dot (*sums)[4], float (*out)[LANES]) {
    Dot total[R][4];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < 4; o++) total[r][o] = first ? sums[r][o] : dot_zero();
    add_dots<R>(w, in, row, first, count, total);
    if (first + count == inputs)
        for (int r = 0; r < R; r++) sums_of_four(total[r], out[r]);
    else
        for (int r = 0; r < R; r++)
            for (int o = 0; o < 4; o++) sums[r][o] = total[r][o];
}

void linear_widened(const Linear& l, int64_t first, int64_t last, const Inputs& in, int64_t rows, const Output& to) {
    const int64_t inputs = l.groups * GROUP, pieces = (inputs + SOME_INPUTS - 1) / SOME_INPUTS;
    const int64_t piece = (l.groups + pieces - 1) / pieces * GROUP;
    float widened[4 * SOME_INPUTS], made[SOME_ROWS][LANES];
    Dot sums[SOME_ROWS][4];
    for (int64_t begin = 0; begin < rows; begin += SOME_ROWS)
        for (int64_t tile = first; tile < last; tile++) {
            const int64_t count = std::min(SOME_ROWS, rows - begin);
            for (int o = 0; o < LANES; o += 4)
                for (int64_t k = 0; k < inputs; k += piece) {
                    const int64_t some = std::min(piece, inputs - k);
                    const bfloat16* from[4];
                    const float* weights[4];
                    for (int i = 0; i < 4; i++) {
                        const int64_t output = std::min(tile * LANES + o + i, l.outputs - 1);
                        from[i] = reinterpret_cast<const bfloat16*>(l.weights) + output * inputs + k;
                        float* put = widened + i * SOME_INPUTS;
                        for (int64_t j = 0; j < some; j += LANES) store(put + j, widen(from[i] + j));
                        weights[i] = put;
                    }
                    // what is widened next comes from memory meanwhile, a part of it with each few rows
                    const int64_t next = k + piece < inputs ? piece : 4 * inputs - k;
                    const int64_t part = (4 * some / GROUP + count / DOT_ROWS) / (count / DOT_ROWS + 1);
                    int64_t ahead = 0, at = 0;
                    for (int64_t r = 0; r < count;) {
                        for (int64_t p = 0; p < part && ahead < 4; p++) {
                            __builtin_prefetch(from[ahead] + next + at);
                            if ((at += GROUP) >= some) at = 0, ahead++;
                        }
                        r += some_rows(count - r, [&](auto n) {
                            auto* out = reinterpret_cast<float(*)[LANES]>(made[r] + o);
                            widened_rows<n()>(weights, in, begin + r, k, some, inputs, sums + r, out);
                        });
                    }
                }
            for (int64_t r = 0; r < count; r++) {
                const Vec total = load(made[r]);
                emit(to, begin + r, tile, l.bias ? total + load(l.bias + tile * LANES) : total);
            }
        }
}

void linear(const Linear& l, int64_t first, int64_t last, const Inputs& in, int64_t rows, const Output& to) {
    if (l.bits == 32 && in.columns && rows >= MANY) return linear_columns<float>(l, first, last, in, rows, to);
    if (l.bits == 16 && !PAIRS) {
        if (in.columns && rows >= MANY_NARROW) return linear_columns<bfloat16>(l, first, last, in, rows, to);
        if (rows >= WIDENED) return linear_widened(l, first, last, in, rows, to);
    }
    // weights come from memory once: all rows multiply some tiles before the next ones are read
    const int64_t step = rows == 1 ? std::max<int64_t>(1, last - first) : rows < 4 ? CHAINS : 1;
    for (int64_t tile = first; tile < last; tile += step) {
        int64_t row = 0, end = std::min(last, tile + step);
        if (l.bits >= 16) {
            for (; row + DOT_ROWS <= rows; row += DOT_ROWS) block<DOT_ROWS, 1>(l, tile, end, in, row, to);
            if constexpr (DOT_ROWS > 3)
                for (; row + 3 <= rows; row += 3) block<3, 1>(l, tile, end, in, row, to);
            if constexpr (DOT_ROWS > 2)
                for (; row + 2 <= rows; row += 2) block<2, 1>(l, tile, end, in, row, to);
            for (; row < rows; row++) block<1, 1>(l, tile, end, in, row, to);
            continue;
        }
        for (; row + ROWS <= rows; row += ROWS) block<ROWS, 1>(l, tile, end, in, row, to);
        if constexpr (ROWS > 8)
            for (; row + 8 <= rows; row += 8) block<8, 1>(l, tile, end, in, row, to);
        for (; row + 4 <= rows; row += 4) block<4, 1>(l, tile, end, in, row, to);
        for (; row + 2 <= rows; row += 2) block<2, (CHAINS > 1 ? 2 : 1)>(l, tile, end, in, row, to);
        for (; row < rows; row++) block<1, CHAINS>(l, tile, end, in, row, to);
    }
}

struct Share { int64_t first, last; };

inline Share share(int64_t count) {  // of this thread
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return {count * thread / threads, count * (thread + 1) / threads};
}

void linear_share(const Linear& l, const Inputs& in, int64_t rows, const Output& to) {
    const Share tiles = share(l.tiles);
    linear(l, tiles.first, tiles.last, in, rows, to);
}

// -- the decoder --------------------------------------------------------------------------------------------------------

struct Layer {
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
    Linear q, k, v, o, gate, up, down;
    void* cache;     // [blocks, 2 * kv_heads, block_size * width]: keys [width, block_size], values [block_size, width]
    int64_t window;  // 0: everything before
};

struct Decoder {
    int64_t layers, hidden, heads, kv_heads, width, inner, block_size, cache_is_bfloat16, embedding_is_bfloat16;
    float eps, scale;
    const void* embedding;
    const float* norm;
    Linear head;
    const Layer* layer;
};

struct Step {
    int64_t rows, wanted, longest, threads;  // longest: keys of the longest sequence
    const int64_t *tokens, *positions;
    const float *cos, *sin;          // [rows, width]
    const int64_t *tables, *blocks;  // of each row, where its sequence's blocks begin in the second
    const int64_t* chosen;           // rows whose logits are wanted
    float* hidden;                   // [rows, hidden]
    float* logits;                   // [wanted, 16 * tiles of the head]
};

inline void normed(const float* x, const float* weight, int64_t width, float eps, float* out) {
    Vec squares = all(0);
    for (int64_t i = 0; i < width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    Vec inverse = all(1.0f / std::sqrt(sum(squares) / float(width) + eps));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * inverse * load(weight + i));
}

inline void turn(float* x, const float* cos, const float* sin, int64_t width) {
    for (int64_t i = 0, half = width / 2; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = std::fma(b, sin[i], a * cos[i]);
        x[i + half] = std::fma(a, sin[i + half], b * cos[i + half]);
    }
}

// Scores of Q queries against 16 keys
template <int Q, class T> inline void score(const float* const* q, const T* keys, int64_t width, int64_t size, float* const* out) {
    Vec total[Q];
    for (int i = 0; i < Q; i++) total[i] = all(0);
    for (int64_t d = 0; d < width; d++, keys += size) {
        Vec k = cached(keys);
        for (int i = 0; i < Q; i++) total[i] = fma(all(q[i][d]), k, total[i]);
    }
    for (int i = 0; i < Q; i++) store(out[i], total[i]);
}

template <int Q, class T>
inline void scores(int count, const float* const* q, const T* keys, int64_t width, int64_t size, float* const* out) {
    if (count == Q) return score<Q>(q, keys, width, size, out);
    if constexpr (Q > 1) scores<Q - 1>(count, q, keys, width, size, out);
}

// Some queries of one head and sequence; `room` is for the scores of each, `stride` apart
template <class T>
void attend(const Decoder& m, const T* cache, int64_t kv_head, const int64_t* blocks, int64_t window, int count,
            const float* const* q, const int64_t* limits, float* const* out, float* room, int64_t stride) {
    const int64_t size = m.block_size, width = m.width, piece = size * width;
    int64_t end = 0, begin = std::numeric_limits<int64_t>::max(), starts[QUERIES];
    for (int i = 0; i < count; i++) {
        starts[i] = window ? std::max<int64_t>(0, limits[i] - window) : 0;
        end = std::max(end, limits[i]), begin = std::min(begin, starts[i]);
    }
    begin = begin / LANES * LANES;
    float* to[QUERIES];
    for (int64_t key = begin; key < end; key += LANES) {
        for (int i = 0; i < count; i++) to[i] = room + i * stride + key;
        scores<QUERIES>(count, q, cache + (blocks[key / size] * 2 * m.kv_heads + kv_head) * piece + key % size, width, size, to);
    }
    for (int i = 0; i < count; i++) {
        float* s = room + i * stride;
        const Vec inverse = all(soften(s, starts[i], limits[i]));
        for (int64_t at = 0; at < width; at += 4 * LANES) {
            const int vecs = int(std::min<int64_t>(4, (width - at) / LANES));
            Vec mixed[4] = {all(0), all(0), all(0), all(0)};
            for (int64_t key = starts[i]; key < limits[i];) {
                const int64_t stop = std::min(limits[i], key / size * size + size);
                const T* values = cache + ((blocks[key / size] * 2 + 1) * m.kv_heads + kv_head) * piece + key % size * width + at;
                if (vecs == 4)
                    for (; key < stop; key++, values += width)
                        for (int v = 0; v < 4; v++) mixed[v] = fma(all(s[key]), cached(values + v * LANES), mixed[v]);
                else
                    for (; key < stop; key++, values += width)
                        for (int v = 0; v < vecs; v++) mixed[v] = fma(all(s[key]), cached(values + v * LANES), mixed[v]);
            }
            for (int v = 0; v < vecs; v++) store(out[i] + at + v * LANES, mixed[v] * inverse);
        }
    }
}

// Rows that stand one after the other in one sequence
struct Run { int64_t row, count; };

template <class T> void run(const Decoder& m, const Step& s) {
    const int64_t qkv = (m.heads + 2 * m.kv_heads) * m.width, mixed = m.heads * m.width, group = m.heads / m.kv_heads;
    const int64_t stride = std::max({m.hidden, m.inner, mixed});  // multiples of GROUP, as heads are of LANES
    const int64_t keys = (s.longest + LANES - 1) / LANES * LANES;
    // one query a unit where there are few, so that every thread has work
    const bool single = s.rows * m.kv_heads < 4 * s.threads || group > QUERIES;
    const int64_t heads_each = single ? 1 : group, rows_each = std::max<int64_t>(1, QUERIES / heads_each);
    std::vector<Run> runs;
    for (int64_t r = 0; r < s.rows; r++) {
        const bool follows = r && s.tables[r] == s.tables[r - 1] && runs.back().count < rows_each;
        if (follows) runs.back().count++;
        else runs.push_back({r, 1});
    }
    const Floats x = floats(s.rows * m.hidden), made = floats(s.rows * qkv);
    const Floats first = floats(s.rows * stride), second = floats(s.rows * stride);
    const Floats sums = floats(s.rows * stride / GROUP), room = floats(s.threads * QUERIES * keys);
    std::vector<bfloat16> pairs(PAIRS ? s.rows * stride : 0);
    const Floats turned = floats(s.rows >= MANY ? s.threads * stride * LANES : 0);
    float* columns = s.rows >= MANY ? turned.get() : nullptr;
    const Inputs in{first.get(), pairs.data(), sums.get(), stride, columns};
    const Inputs inside{second.get(), pairs.data(), sums.get(), stride, columns};

#pragma omp parallel num_threads(int(s.threads))
    {
        const Share rows = share(s.rows), wanted = share(s.wanted);
        const int64_t thread = omp_get_thread_num();
        const Output to_x{x.get(), m.hidden, Output::ADD};
        for (int64_t r = rows.first; r < rows.last; r++)
            for (int64_t i = 0; i < m.hidden; i++) {
                const int64_t at = s.tokens[r] * m.hidden + i;
                x[r * m.hidden + i] = m.embedding_is_bfloat16 ? widen_one(static_cast<const bfloat16*>(m.embedding)[at])
                                                              : static_cast<const float*>(m.embedding)[at];
            }
        for (int64_t n = 0; n < m.layers; n++) {
            const Layer& l = m.layer[n];
            T* cache = static_cast<T*>(l.cache);
            for (int64_t r = rows.first; r < rows.last; r++) {
                normed(x.get() + r * m.hidden, l.attention_norm, m.hidden, m.eps, in.values + r * stride);
                prepare(in, r, m.hidden / GROUP);
            }
#pragma omp barrier
            linear_share(l.q, in, s.rows, {made.get(), qkv, Output::STORE});
            linear_share(l.k, in, s.rows, {made.get() + mixed, qkv, Output::STORE});
            linear_share(l.v, in, s.rows, {made.get() + mixed + m.kv_heads * m.width, qkv, Output::STORE});
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t u = 0; u < s.rows * (m.heads + 2 * m.kv_heads); u++) {
                const int64_t r = u / (m.heads + 2 * m.kv_heads), h = u % (m.heads + 2 * m.kv_heads);
                float* at = made.get() + r * qkv + h * m.width;
                const bool is_q = h < m.heads, is_k = !is_q && h < m.heads + m.kv_heads;
                if (is_q || is_k) {
                    const float* weight = is_q ? l.q_norm : l.k_norm;
                    if (weight) normed(at, weight, m.width, m.eps, at);
                    turn(at, s.cos + r * m.width, s.sin + r * m.width, m.width);
                }
                if (is_q) {
                    for (int64_t i = 0; i < m.width; i++) at[i] *= m.scale;
                    continue;
                }
                const int64_t place = s.positions[r], block = s.blocks[s.tables[r] + place / m.block_size], slot = place % m.block_size;
                T* to = cache + (block * 2 * m.kv_heads + h - m.heads) * m.block_size * m.width;
                for (int64_t i = 0; i < m.width; i++) put(is_k ? to + i * m.block_size + slot : to + slot * m.width + i, at[i]);
            }
            const int64_t parts = m.heads / heads_each;
#pragma omp for schedule(dynamic, 1)
            for (int64_t u = 0; u < int64_t(runs.size()) * parts; u++) {
                const Run run = runs[u / parts];
                const int64_t head = u % parts * heads_each;
                const float* q[QUERIES];
                float* out[QUERIES];
                int64_t limits[QUERIES];
                int count = 0;
                for (int64_t r = run.row; r < run.row + run.count; r++)
                    for (int64_t h = head; h < head + heads_each; h++, count++) {
                        q[count] = made.get() + r * qkv + h * m.width;
                        out[count] = in.values + r * stride + h * m.width;
                        limits[count] = s.positions[r] + 1;
                    }
                attend(m, cache, head / group, s.blocks + s.tables[run.row], l.window, count, q, limits, out,
                       room.get() + thread * QUERIES * keys, keys);
            }
            for (int64_t r = rows.first; r < rows.last; r++) prepare(in, r, mixed / GROUP);
#pragma omp barrier
            linear_share(l.o, in, s.rows, to_x);
#pragma omp barrier
            for (int64_t r = rows.first; r < rows.last; r++) {
                normed(x.get() + r * m.hidden, l.mlp_norm, m.hidden, m.eps, in.values + r * stride);
                prepare(in, r, m.hidden / GROUP);
            }
#pragma omp barrier
            linear_share(l.gate, in, s.rows, {inside.values, stride, Output::STORE});
            linear_share(l.up, in, s.rows, {inside.values, stride, Output::GATE});  // of the tiles that this thread stored
#pragma omp barrier
            for (int64_t r = rows.first; r < rows.last; r++) prepare(inside, r, m.inner / GROUP);
#pragma omp barrier
            linear_share(l.down, inside, s.rows, to_x);
#pragma omp barrier
        }
        for (int64_t r = rows.first; r < rows.last; r++)
            normed(x.get() + r * m.hidden, m.norm, m.hidden, m.eps, s.hidden + r * m.hidden);
#pragma omp barrier
        for (int64_t i = wanted.first; i < wanted.last; i++) {
            std::memcpy(in.values + i * stride, s.hidden + s.chosen[i] * m.hidden, m.hidden * sizeof(float));
            prepare(in, i, m.hidden / GROUP);
        }
#pragma omp barrier
        linear_share(m.head, in, s.wanted, {s.logits, m.head.tiles * LANES, Output::STORE});
    }
}

}  // namespace

extern "C" {

// All functions but the last give 0, or 1 where there was no memory.

// values [rows, groups * 32] -> out [rows, tiles * 16]
int pellucid_linear(const Linear* l, float* values, int64_t rows, float* out, int64_t threads) try {
    const int64_t stride = l->groups * GROUP;
    const Floats sums = floats(rows * l->groups);
    std::vector<bfloat16> pairs(PAIRS ? rows * stride : 0);
    const Inputs in{values, pairs.data(), sums.get(), stride};
#pragma omp parallel num_threads(int(threads))
    {
        const Share mine = share(rows);
        if (l->bits != 8)
            for (int64_t r = mine.first; r < mine.last; r++) prepare(in, r, l->groups);
#pragma omp barrier
        linear_share(*l, in, rows, {out, l->tiles * LANES, Output::STORE});
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// x [rows, groups * 32] -> out [rows, outputs], weights of 16 bits
int pellucid_linear_bfloat16(const Linear* l, const bfloat16* x, int64_t rows, bfloat16* out, int64_t threads) try {
    const int64_t stride = l->groups * GROUP, made_stride = l->tiles * LANES;
    const Floats values = floats(rows * stride), sums = floats(rows * l->groups), made = floats(rows * made_stride);
    std::vector<bfloat16> pairs(PAIRS ? rows * stride : 0);
    const Inputs in{values.get(), pairs.data(), sums.get(), stride};
#pragma omp parallel num_threads(int(threads))
    {
        const Share mine = share(rows), tiles = share(l->tiles);
        for (int64_t r = mine.first; r < mine.last; r++) {
            for (int64_t k = 0; k < stride; k += LANES) store(values.get() + r * stride + k, widen(x + r * stride + k));
            if (PAIRS) prepare(in, r, l->groups);
        }
#pragma omp barrier
        linear(*l, tiles.first, tiles.last, in, rows, {made.get(), made_stride, Output::STORE});
        for (int64_t r = 0; r < rows; r++)
            for (int64_t tile = tiles.first; tile < tiles.last; tile++) {
                bfloat16* to = out + r * l->outputs + tile * LANES;
                const Vec v = load(made.get() + r * made_stride + tile * LANES);
                if (tile * LANES + LANES <= l->outputs) {
                    narrow(to, v);
                    continue;
                }
                bfloat16 rounded[LANES];
                narrow(rounded, v);
                std::copy_n(rounded, l->outputs - tile * LANES, to);
            }
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

int pellucid_decode(const Decoder* m, const Step* s) try {
    if (m->cache_is_bfloat16) run<bfloat16>(*m, *s);
    else run<float>(*m, *s);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// whether pairs of bfloat16 are rounded and multiplied
int64_t pellucid_pairs() { return PAIRS; }

}
