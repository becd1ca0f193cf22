// Pages: the children of a node in an order that puts near ones together, new ones, and those that leave.
#pragma once

#include "ranking.h"

// by so much more is a squared norm larger than another, and not by rounding
constexpr float LARGER = 1 + 1e-4;

inline int32_t new_page(const Tree& tree, int32_t node) {
    int32_t page = tree.state[FREE];
    if (page == ABSENT)
        page = tree.state[PAGES]++;
    else
        tree.state[FREE] = tree.page[page].next;
    tree.page[page] = {node, 0, ABSENT};
    std::fill_n(tree.slots[page], tree.slots.width, ABSENT);
    return page;
}

// Take an empty page, which follows `before` (`ABSENT`: the first), out of its node's chain.
inline void free_page(const Tree& tree, int32_t before, int32_t page) {
    if (before == ABSENT)
        tree.node[tree.page[page].node].first = tree.page[page].next;
    else
        tree.page[before].next = tree.page[page].next;
    tree.page[page].node = ABSENT, tree.page[page].next = tree.state[FREE];
    tree.state[FREE] = page;
}

inline void put(const Tree& tree, int32_t page, int32_t row) {
    int32_t slot = tree.page[page].count++;
    tree.slots[page][slot] = row;
    tree.point[row].page = page, tree.point[row].slot = slot;
}

// Remove a point from its page; the last member fills the gap.
inline void take(const Tree& tree, int32_t row) {
    int32_t page = tree.point[row].page, slot = tree.point[row].slot, last = --tree.page[page].count;
    int32_t moved = tree.slots[page][last];
    tree.slots[page][slot] = moved, tree.point[moved].slot = slot;
    tree.slots[page][last] = ABSENT;
}

inline void count_child(const Tree& tree, int32_t node, int32_t row, int sign) {
    tree.node[node].children += sign;
    std::vector<float> key = tree.key(row);
    for (size_t k = 0; k < key.size(); k++) tree.node_sum[node][k] += sign * key[k];
}

inline void order_by_projection(const Tree& tree, int32_t* rows, int64_t count) {
    std::vector<float> values(count);
    for (int64_t i = 0; i < count; i++) values[i] = tree.projection[rows[i]][0] + tree.height(rows[i]) * tree.upright(0);
    sort(values.data(), rows, count);
}

// Members of page `number` of so many that share `count` evenly: the fuller ones come first, or late.
inline int64_t members_of(int64_t number, int64_t count, int64_t pages, bool late) {
    int64_t fuller = count % pages;
    return count / pages + (late ? number >= pages - fuller : number < fuller);
}
inline int64_t pages_for(const Tree& tree, int64_t count) { return (count + tree.slots.width - 1) / tree.slots.width; }

// Order points so that cutting them evenly into pages puts near ones together.
//
// Each page begins with the largest key left, since a large key is what queries find, and takes the keys nearest to it
// by T_K. Of keys that a norm of their own has made equally long the first begins, not the one rounded up.
inline void order_greedily(const Tree& tree, int32_t* rows, int64_t count, bool late, const Workspace& work) {
    int64_t pages = pages_for(tree, count), start = 0;
    for (int64_t page = 0; page < pages; page++) {
        int64_t size = members_of(page, count, pages, late), seed = start;
        for (int64_t i = start; i < count; i++)
            if (tree.point[rows[i]].norm2 > LARGER * tree.point[rows[seed]].norm2) seed = i;
        std::swap(rows[start], rows[seed]);
        // without the seed, and with the three entries that `products` wants
        int64_t left = count - start - 1;
        std::vector<int32_t> rest(rows + start + 1, rows + count);
        rest.resize(left + 3);
        affinities(tree, rows[start], {rest.data(), left, 1}, left, work);
        int64_t near = best(work.score[0], left, size - 1, work.picked.data);
        int32_t *chosen = rows + start + 1, *other = chosen + near;
        for (int64_t i = 0, at = 0; i < left; i++) {
            bool is_near = at < near && work.picked[at] == i;
            *(is_near ? chosen : other)++ = rest[i];
            at += is_near;
        }
        start += size;
    }
}

// Order points for pages; up to one page there is nothing to order.
inline void order(const Tree& tree, int32_t* rows, int64_t count, bool greedy, bool late, const Workspace& work) {
    if (count <= tree.slots.width) return;
    greedy ? order_greedily(tree, rows, count, late, work) : order_by_projection(tree, rows, count);
}

// Put ordered points into ceil(count / page size) new pages of `node`, evenly, chained after page `after`.
inline void fill_pages(const Tree& tree, int32_t node, const int32_t* rows, int64_t count, int32_t after, bool late) {
    int64_t pages = pages_for(tree, count);
    for (int64_t number = 0; number < pages; number++) {
        int32_t page = new_page(tree, node);
        int32_t& link = after == ABSENT ? tree.node[node].first : tree.page[after].next;
        tree.page[page].next = std::exchange(link, page);
        after = page;
        for (int64_t left = members_of(number, count, pages, late); left > 0; left--) put(tree, page, *rows++);
    }
}

// Put points into the pages of their parents, which have none yet; a node's fuller pages come first, or late.
inline void load_children(const Tree& tree, Array<const int32_t, 1> rows, Array<const int32_t, 1> parents, bool greedy,
                          bool late, const Workspace& work) {
    std::vector<int64_t> starts(tree.nodes() + 1);
    for (int32_t parent : parents) starts[parent + 1]++;
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<int64_t> ends(starts);
    std::vector<int32_t> grouped(rows.size());
    for (int64_t i = 0; i < rows.size(); i++) grouped[ends[parents[i]]++] = rows[i];
    for (int32_t node = 0; node < tree.nodes(); node++) {
        int32_t* of_node = grouped.data() + starts[node];
        int64_t count = ends[node] - starts[node];
        order(tree, of_node, count, greedy, late, work);
        fill_pages(tree, node, of_node, count, ABSENT, late);
        for (int64_t i = 0; i < count; i++) count_child(tree, node, of_node[i], 1);
    }
}

// The page of `node` a newcomer belongs in: its nearest child's, or by the order of projections.
inline int32_t page_for(const Tree& tree, int32_t node, int32_t row, bool greedy, const Workspace& work) {
    int32_t page = tree.node[node].first;
    if (page == ABSENT || tree.page[page].next == ABSENT) return page;
    if (greedy) {
        int64_t count = children_of(tree, node, 0, work);
        affinities(tree, row, work.rows, count, work);
        best(work.score[0], count, 1, work.picked.data);
        return tree.point[work.rows[work.picked[0]]].page;
    }
    auto projection = [&](int32_t of) { return tree.projection[of][0] + tree.height(of) * tree.upright(0); };
    float of_row = projection(row);
    for (; tree.page[page].next != ABSENT; page = tree.page[page].next)
        for (int32_t slot = 0; slot < tree.page[page].count; slot++)
            if (projection(tree.slots[page][slot]) >= of_row) return page;
    return page;
}

// Put points one by one into pages of their parents; a full page splits in two even halves.
inline void add_children(const Tree& tree, Array<const int32_t, 1> rows, Array<const int32_t, 1> parents, bool greedy,
                         const Workspace& work) {
    int64_t size = tree.slots.width;
    for (int64_t i = 0; i < rows.size(); i++) {
        int32_t node = parents[i], row = rows[i], page = page_for(tree, node, row, greedy, work);
        count_child(tree, node, row, 1);
        if (page == ABSENT) {
            fill_pages(tree, node, &row, 1, ABSENT, false);
        } else if (tree.page[page].count < size) {
            put(tree, page, row);
        } else {
            std::vector<int32_t> members(tree.slots[page], tree.slots[page] + size);
            members.push_back(row);
            order(tree, members.data(), size + 1, greedy, false, work);
            std::fill_n(tree.slots[page], size, ABSENT);
            tree.page[page].count = 0;
            int64_t half = (size + 2) / 2;
            for (int64_t j = 0; j < half; j++) put(tree, page, members[j]);
            fill_pages(tree, node, &members[half], size + 1 - half, page, false);
        }
    }
}

// Move the members of the next page in the chain into `page`.
inline void join(const Tree& tree, int32_t page, int32_t after) {
    while (tree.page[after].count) {
        int32_t row = tree.slots[after][tree.page[after].count - 1];
        take(tree, row);
        put(tree, page, row);
    }
    free_page(tree, page, after);
}

// Take one point from its parent; a page less than half full joins its neighbour in the chain if both fit one.
inline void remove_child(const Tree& tree, int32_t row) {
    int32_t page = tree.point[row].page, node = tree.page[page].node;
    take(tree, row);
    count_child(tree, node, row, -1);
    int64_t size = tree.slots.width, count = tree.page[page].count;
    if (2 * count >= size) return;
    int32_t before = ABSENT, after = tree.page[page].next;
    for (int32_t other = tree.node[node].first; other != page; other = tree.page[other].next) before = other;
    if (count == 0)
        free_page(tree, before, page);
    else if (after != ABSENT && count + tree.page[after].count <= size)
        join(tree, page, after);
    else if (before != ABSENT && count + tree.page[before].count <= size)
        join(tree, before, page);
}
