// What Python calls of the DCI tree, by `methods.icecache.kernels`: of one tree, or of all trees of a layer.
//
// Nothing here holds state: any number of threads may build, or ask, different trees at once, and different workspaces
// may ask the same tree. A tree is a dozen arrays, which another one shares none of; a line names them, and a directory
// has the lines of all trees of a layer.
#include "anchors.h"
#include "choosing.h"
#include "p_dci.h"

template <class T>
static Matrix<T> matrix(Array<T, 2> array) {
    return {array.data, array.sizes[0], array.sizes[1]};
}
static Matrix<float> asked(Array<const float, 2> queries) {
    return {const_cast<float*>(queries.data), queries.sizes[0], queries.sizes[1]};
}

// -- one tree --------------------------------------------------------------------------------------------------------

static int64_t measure_rows(Lined tree, int64_t start, int64_t stop) { return measure(tree_at(tree.data), start, stop); }
KERNEL(measure_rows)

static int64_t levels(Array<int64_t, 1> level_size, int64_t top, Array<const double, 1> draws, double first,
                      double above, Array<int32_t, 1> levels) {
    assign_levels(level_size, top, draws, first, above, levels);
    return 0;
}
KERNEL(levels)
KERNEL(assign_levels_in_turn)

static int64_t nodes(Lined tree, Array<const int32_t, 1> rows, int64_t level) {
    add_nodes(tree_at(tree.data), rows, level);
    return 0;
}
KERNEL(nodes)

static int64_t parents(Lined tree, Array<const int32_t, 1> rows, int64_t level, int64_t fov, int64_t exhaustive_below,
                       Lined work, Array<int32_t, 1> parents) {
    nearest_nodes(tree_at(tree.data), rows.data, rows.size(), level, fov, exhaustive_below, work_at(work.data),
                  parents.data);
    return 0;
}
KERNEL(parents)

static int64_t anchored_parents(Lined tree, Array<const int32_t, 1> rows, int64_t level, int64_t interval,
                                int64_t reach, double threshold, int64_t fov, int64_t exhaustive_below, Lined work,
                                Array<int32_t, 1> parents) {
    anchored_nodes(tree_at(tree.data), rows, level, interval, reach, threshold, fov, exhaustive_below,
                   work_at(work.data), parents);
    return 0;
}
KERNEL(anchored_parents)

static int64_t new_root(Lined tree, int64_t node, Lined work) {
    take_over_root(tree_at(tree.data), node, work_at(work.data));
    return 0;
}
KERNEL(new_root)

static int64_t leaving(Lined tree, int64_t node, int64_t fov, int64_t exhaustive_below, Lined work) {
    return leave_for(tree_at(tree.data), node, fov, exhaustive_below, work_at(work.data));
}
KERNEL(leaving)

static int64_t load_pages(Lined tree, Array<const int32_t, 1> rows, Array<const int32_t, 1> parents, int64_t greedy,
                    int64_t late, Lined work) {
    load_children(tree_at(tree.data), rows, parents, greedy, late, work_at(work.data));
    return 0;
}
KERNEL(load_pages)

static int64_t add(Lined tree, Array<const int32_t, 1> rows, Array<const int32_t, 1> parents, int64_t greedy,
                   Lined work) {
    add_children(tree_at(tree.data), rows, parents, greedy, work_at(work.data));
    return 0;
}
KERNEL(add)

// Returns pages listed; ranked [1], written: nodes that were scored.
static int64_t list_best(Lined tree, Array<const float, 2> queries, int64_t fov, int64_t exhaustive_below,
                         int64_t by_centroid, Lined work, Array<int64_t, 1> ranked) {
    Listing listing = search(tree_at(tree.data), asked(queries), fov, exhaustive_below, by_centroid, work_at(work.data));
    ranked[0] = listing.ranked;
    return listing.runs;
}
KERNEL(list_best)

static int64_t list_all(Lined tree, Lined work) { return scan(tree_at(tree.data), work_at(work.data)); }
KERNEL(list_all)

// The best of `runs` listed pages, or of their members, for each query: ids, scores [G, P], best first, then -1 and
// -inf.
static int64_t choose(Lined tree, int64_t runs, Array<const float, 2> queries, int64_t rows, Array<int32_t, 2> ids,
                      Array<float, 2> scores, Lined work) {
    (rows ? best_rows : best_pages)(tree_at(tree.data), runs, asked(queries), matrix(ids), matrix(scores),
                                    work_at(work.data));
    return 0;
}
KERNEL(choose)

// The same by P-DCI. Returns how many keys were scored.
static int64_t choose_by_p_dci(Lined tree, Array<const float, 2> queries, int64_t fov, int64_t composites,
                               int64_t simple, double share, int64_t rows, Array<int32_t, 2> ids,
                               Array<float, 2> scores, Lined work) {
    return (rows ? p_dci_rows : p_dci_pages)(tree_at(tree.data), asked(queries), fov, {composites, simple, share},
                                             matrix(ids), matrix(scores), work_at(work.data));
}
KERNEL(choose_by_p_dci)

static int64_t products_of(Lined tree, Array<int32_t, 1> rows, int64_t count, Array<const float, 2> queries,
                           Array<float, 2> out) {
    products(tree_at(tree.data), {rows.data, rows.size(), 1}, 0, count, asked(queries), matrix(out));
    return 0;
}
KERNEL(products_of)

static int64_t interleave(Array<int32_t, 2> lists, Array<int32_t, 1> joined) {
    std::vector<int32_t> ids = interleaved(matrix(lists), joined.size());
    ids.resize(joined.size(), ABSENT);
    std::copy(ids.begin(), ids.end(), joined.data);
    return 0;
}
KERNEL(interleave)

// -- a layer ---------------------------------------------------------------------------------------------------------

// A row of the batch: its budget, sinks, first token of the window, length, and most pages recalled.
struct Region {
    int64_t capacity, sinks, window, length, slots;

    bool is_whole() const { return capacity >= length; }
    // The tokens always attended: the window, newest first, and the sinks; of a row within its budget all. How many.
    int64_t write_fixed(int64_t* tokens) const {
        int64_t count = 0, room = std::min(capacity, length);
        for (int64_t token = length - 1; token >= (is_whole() ? 0 : window) && count < room; token--)
            tokens[count++] = token;
        for (int64_t token = 0; !is_whole() && token < std::min(sinks, length) && count < room; token++)
            tokens[count++] = token;
        return count;
    }
};

// How trees are asked: fov of `search`, at least, and as a share of the points; its exhaustive_below and by_centroid;
// and whether every page is scored instead; or, with composites, P-DCI.
struct Asking {
    int64_t least;
    double share;
    int64_t exhaustive_below, by_centroid, exact;
    PDCI p_dci;

    // Fill pages, scores [G, P]; how many keys were scored.
    int64_t best(const Tree& tree, const Matrix<float>& queries, const Matrix<int32_t>& pages,
                 const Matrix<float>& scores, const Workspace& work) const {
        int64_t wide = std::max({least, pages.width, int64_t(std::ceil(share * tree.state[POINTS]))});
        if (p_dci.composites && !exact) return p_dci_pages(tree, queries, wide, p_dci, pages, scores, work);
        int64_t runs = exact ? scan(tree, work) : search(tree, queries, wide, exhaustive_below, by_centroid, work).runs;
        int64_t scored = work.starts[runs];
        best_pages(tree, runs, queries, pages, scores, work);
        return scored;
    }
};

// What all KV heads attend: window, sinks, and the members of the best pages.
//
// works, directory: a line for the workspace of each thread, and for each tree; queries [T, G, D]; regions [B, 5], see
// `Region`; then `Asking`. Written: index [T, M], tokens, those always attended first, then page by page, best first,
// then -1; and [T] each: how many tokens; keys scored, by their sketches; and whether a query of this head is not
// finite.
static int64_t attend(Array<const int64_t, 2> works, Array<const int64_t, 2> directory, Array<const float, 3> queries,
                      Array<const int64_t, 2> regions, int64_t least, double share, int64_t exhaustive_below,
                      int64_t by_centroid, int64_t exact, int64_t composites, int64_t simple, double enough,
                      Array<int64_t, 2> index, Array<int64_t, 1> used, Array<int64_t, 1> read,
                      Array<int64_t, 1> refused) {
    Asking how{least, share, exhaustive_below, by_centroid, exact, {composites, simple, enough}};
    int64_t heads = directory.size() / regions.size();
    Claims claims(directory.size());
    in_threads(works.size(), [&](int thread) {
        const Workspace& work = work_at(works[thread].data);
        for (int64_t head; claims.take(head);) {
            const Region& region = *reinterpret_cast<const Region*>(regions[head / heads].data);
            const Tree& tree = tree_at(directory[head].data);
            Array<int64_t, 1> tokens = index[head];
            int64_t count = region.write_fixed(tokens.data);
            int64_t pages = std::min(region.slots, tree.state[PAGES]);
            read[head] = refused[head] = 0;
            if (!region.is_whole() && pages > 0) {
                Matrix<float> group = asked(queries[head]);
                float* end = group.data + group.rows * group.width;
                refused[head] = std::any_of(group.data, end, [](float x) { return !std::isfinite(x); });
                std::vector<int32_t> lists(group.rows * pages);
                std::vector<float> scores(lists.size());
                Matrix<int32_t> listed{lists.data(), group.rows, pages};
                if (!refused[head]) {
                    read[head] = how.best(tree, group, listed, {scores.data(), group.rows, pages}, work);
                    for (int32_t page : interleaved(listed, pages))
                        for (int32_t slot = 0; slot < tree.page[page].count && count < region.capacity; slot++)
                            tokens[count++] = tree.token[tree.slots[page][slot]] + region.sinks;
                }
            }
            std::fill(tokens.data + count, tokens.end(), ABSENT);
            used[head] = count;
        }
    });
    return 0;
}
KERNEL(attend)

// Insert the next rows into a tree, up to the first that only `DCITree.insert` can take: one that is to be promoted, for
// which there is no room, or that is not finite; how many. share, above: promoted by the counter.
static int64_t insert_leaves_of(const Tree& tree, int64_t count, double share, double above, int64_t fov,
                                int64_t exhaustive_below, bool greedy, const Workspace& work) {
    int64_t start = tree.state[POINTS], top = tree.state[TOP];
    if (top == 0 || start + count > tree.point.size || tree.state[PAGES] + count > tree.page.size) return 0;
    std::vector<int32_t> levels(count);
    std::vector<int64_t> level_size(tree.level_size.data, tree.level_size.data + tree.level_size.size);
    assign_levels({level_size.data(), {tree.level_size.size}}, top, {nullptr, {0}}, share, above,
                  {levels.data(), {count}});
    int64_t leaves = std::find_if(levels.begin(), levels.end(), [](int32_t level) { return level != 1; }) -
                     levels.begin();
    if (leaves == 0 || measure(tree, start, start + count) != ABSENT) return 0;
    std::vector<int32_t> rows(leaves), parents(leaves, ROOT);
    std::iota(rows.begin(), rows.end(), start);
    for (int32_t row : rows) {
        tree.token[row] = row;
        tree.point[row].node = ABSENT, tree.point[row].affinity = 0;
    }
    tree.state[POINTS] += leaves, tree.level_size[1] += leaves;
    if (top > 1) nearest_nodes(tree, rows.data(), leaves, 2, fov, exhaustive_below, work, parents.data());
    add_children(tree, {rows.data(), {leaves}}, {parents.data(), {leaves}}, greedy, work);
    return leaves;
}

// Into the trees first .. stop - 1, counts [B] rows of key memory, of each row of the batch; taken [T], written.
static int64_t insert_leaves(Array<const int64_t, 2> directory, int64_t first, int64_t stop,
                             Array<const int64_t, 1> counts, double share, double above, int64_t fov,
                             int64_t exhaustive_below, int64_t greedy, Lined work, Array<int64_t, 1> taken) {
    int64_t heads = directory.size() / counts.size();
    for (int64_t head = first; head < stop; head++)
        taken[head] = insert_leaves_of(tree_at(directory[head].data), counts[head / heads], share, above, fov,
                                       exhaustive_below, greedy, work_at(work.data));
    return 0;
}
KERNEL(insert_leaves)
