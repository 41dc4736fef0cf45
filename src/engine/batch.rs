//! Which tokens are computed next.

/// Where states are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Boundaries are multiples of it; itself a multiple of the page size.
    pub step: usize,
    /// Also at the exact end of a prompt and of an answer. Needs pages of one token.
    pub exact_end: bool,
}

// === impl Grid ===

impl Grid {
    /// The grid of `every` tokens for pages of `page_size`: their least common multiple. `None` if
    /// that is no size.
    pub fn new(every: usize, page_size: usize, exact_end: bool) -> Option<Self> {
        let (mut a, mut b) = (every, page_size);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        let step = every.checked_div(a)?.checked_mul(page_size)?;
        (step > 0).then_some(Self { step, exact_end })
    }

    /// The last boundary of the grid at or below `tokens`.
    pub fn floor(self, tokens: usize) -> usize {
        tokens - tokens % self.step
    }

    /// Whether a state is taken at `done` of a prompt of `prompt` tokens.
    pub fn is_boundary(self, done: usize, prompt: usize, branch: Option<usize>) -> bool {
        done.is_multiple_of(self.step) || branch == Some(done) || (self.exact_end && done == prompt)
    }

    /// Where the next chunk of a prompt ends that starts at `done` and may have `budget` tokens
    /// (at least 1). Chunks end on the grid, so that a state can be taken there; a prompt's last
    /// boundary and its branch point get a chunk end of their own.
    pub fn chunk_end(
        self,
        done: usize,
        prompt: usize,
        branch: Option<usize>,
        budget: usize,
    ) -> usize {
        let end = prompt.min(done.saturating_add(budget));
        let grid = self.floor(end);
        let end = if grid > done { grid } else { end };
        branch
            .filter(|branch| (done + 1..end).contains(branch))
            .unwrap_or(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(
        grid: Grid,
        start: usize,
        prompt: usize,
        branch: Option<usize>,
        b: usize,
    ) -> Vec<usize> {
        let mut ends = vec![start];
        while *ends.last().unwrap() < prompt {
            ends.push(grid.chunk_end(*ends.last().unwrap(), prompt, branch, b));
        }
        ends
    }

    #[test]
    fn chunks_end_on_the_grid() {
        let grid = Grid::new(256, 64, false).unwrap();
        assert_eq!(grid.step, 256);
        assert_eq!(ends(grid, 0, 1300, None, 512), [0, 512, 1024, 1280, 1300]);
        assert_eq!(ends(grid, 1024, 1300, None, 512), [1024, 1280, 1300]);
        assert_eq!(ends(grid, 0, 1024, Some(768), 512), [0, 512, 768, 1024]);
        assert_eq!(ends(grid, 0, 300, None, 700), [0, 256, 300]);
        // A budget below the grid still meets every boundary.
        assert_eq!(
            ends(grid, 0, 600, None, 100),
            [0, 100, 200, 256, 356, 456, 512, 600]
        );
        // A start off the grid, as after an exact end, comes back to it.
        assert_eq!(ends(grid, 300, 1000, None, 512), [300, 768, 1000]);
    }

    #[test]
    fn the_grid_is_whole_pages() {
        assert_eq!(Grid::new(256, 96, false).map(|grid| grid.step), Some(768));
        assert_eq!(Grid::new(256, 1, true).map(|grid| grid.step), Some(256));
        assert_eq!(Grid::new(256, usize::MAX, false), None);
        assert_eq!(Grid::new(0, 64, false), None);
    }

    #[test]
    fn states_are_taken_at_boundaries_only() {
        let grid = Grid::new(256, 1, false).unwrap();
        assert!(grid.is_boundary(512, 600, None) && !grid.is_boundary(600, 600, None));
        let exact = Grid::new(256, 1, true).unwrap();
        assert!(exact.is_boundary(600, 600, None) && !exact.is_boundary(599, 600, None));
    }
}
